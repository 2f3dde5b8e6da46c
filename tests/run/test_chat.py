"""`draftlab chat`: pieces of an answer, marked drafts, the history, and what it prints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftlab.cli import app
from draftlab.cli.chat import _messages
from draftlab.engine.sampling import Sampling
from draftlab.errors import UserError
from draftlab.run.api import load_trained_head
from draftlab.run.chat import Chat
from draftlab.run.resolve import find_head
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import prompt_ids

QUESTION = "Write a Python function that adds two numbers."


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    settings = TargetSettings(device="cpu")
    target, tokenizer = load_target(settings), load_tokenizer(settings)
    head = load_trained_head(find_head("reference"), target, tokenizer)
    return {"target": target, "head": head, "tokenizer": tokenizer, "k": 3}


def chat(parts: dict[str, Any], temperature: float = 0.0, **options: Any) -> Chat:
    options = {"max_new_tokens": 24, "max_length": 256, "sampling": Sampling(temperature)} | options
    return Chat(**parts, **options)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_pieces_are_the_answer_and_drafts_are_marked(
    parts: dict[str, Any], temperature: float
) -> None:
    session, pieces = chat(parts, temperature), []
    first = session.answer(QUESTION, lambda *piece: pieces.append(piece))
    text = parts["tokenizer"].decode(first.token_ids, skip_special_tokens=True)
    assert "".join(text for text, _ in pieces) == text == session.messages[-1]["content"]
    drafted = sum(marked for _, marked in pieces)
    assert 0 < drafted <= first.counters.accepted
    assert len(pieces) - drafted <= first.counters.drafts + 1, "one token a step is the target's"
    if not temperature:
        assert session.plain().token_ids == first.token_ids


def test_the_history_is_part_of_the_next_prompt(parts: dict[str, Any]) -> None:
    session = chat(parts, system="Be short.")
    session.answer(QUESTION, lambda *_: None)
    asked = [*session.messages, {"role": "user", "content": "And three?"}]
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    again = chat(parts)
    again.messages = asked[:-1]
    expected = again.answer("And three?", lambda *_: None)
    assert session.answer("And three?", lambda *_: None).token_ids == expected.token_ids
    assert session.messages == again.messages


def test_a_conversation_that_is_too_long_is_refused(parts: dict[str, Any]) -> None:
    length = len(prompt_ids(parts["tokenizer"], [{"role": "user", "content": QUESTION}]))
    session = chat(parts, max_length=length)
    with pytest.raises(UserError, match=f"fewer than {length} tokens, found {length}"):
        session.answer(QUESTION, lambda *_: None)


def test_an_interrupted_answer_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(_: Chat, __: str, show: Any) -> None:
        show("half an ans", False)
        raise KeyboardInterrupt

    monkeypatch.setattr(Chat, "answer", answer)
    options = ("--head", "reference", "--target", "embedded")
    result = CliRunner().invoke(app, ["chat", *options], input=f"{QUESTION}\n")
    assert result.exit_code == 130
    assert "half an ans\ninterrupted" in result.output


def test_what_it_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--head", "reference", "--target", "embedded", "--max-new-tokens", "12", "--plain")
    result = CliRunner().invoke(app, ["chat", *options], input=f"{QUESTION}\n\nno message\n")
    assert result.exit_code == 0, result.output
    lines = " ".join(result.output.split())
    assert lines.count("12 tokens · AL ") == 1
    assert "tokens/s · without drafts" in lines
    assert "(the same tokens)" in lines
    assert "cut at the limit" in lines


def test_bytes_that_are_not_utf8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):  # the latter is Python's in the C locale
        lines = io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8", errors)
        monkeypatch.setattr("sys.stdin", lines)
        with pytest.raises(UserError, match="expected text in UTF-8"):
            next(_messages())
