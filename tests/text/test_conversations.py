"""Strict JSONL: what is read, what is refused and where, what is dropped and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.text.conversations import (
    Answer,
    Conversation,
    PromptSettings,
    load_prompts,
    read_conversations,
    with_answers,
    write_conversations,
)


class Lines(Monitor):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def line(**changes) -> dict:
    """A good line with changes; a value of None leaves the key out."""
    good = {"id": "a", "messages": [{"role": "user", "content": "hi"}], "source": "s"}
    return {key: value for key, value in {**good, **changes}.items() if value is not None}


def write(path: Path, *lines: dict | str | bytes) -> Path:
    encoded = [
        part
        if isinstance(part, bytes)
        else part.encode()
        if isinstance(part, str)
        else json.dumps(part).encode()
        for part in lines
    ]
    path.write_bytes(b"".join(part + b"\n" for part in encoded))
    return path


def test_what_is_written_is_read_back(tmp_path: Path):
    chat = [{"role": "user", "content": "a\u2028b\n日本"}, {"role": "assistant", "content": ""}]
    conversations = [
        Conversation("x", chat, "s", 0.8, (Answer((1, 2), (3,), "stop"),)),
        Conversation("y", chat[:1], "s"),
    ]
    write_conversations(tmp_path / "c.jsonl", conversations)
    assert read_conversations(tmp_path / "c.jsonl") == conversations


def test_tools_calls_and_reasoning_are_read_back(tmp_path: Path):
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": [1]}}}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "a"},
    ]
    # Of one file some may have tools and others none.
    conversations = [
        Conversation("x", chat, "s", tools=({"type": "function", "function": {"name": "f"}},)),
        Conversation("y", chat[:1], "s"),
    ]
    write_conversations(tmp_path / "c.jsonl", conversations)
    assert read_conversations(tmp_path / "c.jsonl") == conversations


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": "q", "reasoning_content": "hm"}, "only an assistant has"),
        ({"role": "assistant", "content": "q", "tool_calls": []}, "tool_calls"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            "function.arguments",
        ),
        ({"role": "judge", "content": "q"}, "role"),
    ],
)
def test_calls_that_do_not_fit_are_errors(tmp_path: Path, message: dict, says: str):
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": [message]}) + "\n")
    with pytest.raises(UserError, match=says):
        read_conversations(path)


def test_ids_and_sources_may_be_left_out_of_all_lines(tmp_path: Path):
    path = write(tmp_path / "mine.jsonl", *[line(id=None, source=None)] * 2)
    found = [(c.id, c.source) for c in read_conversations(path)]
    assert found == [("mine:1", "mine.jsonl"), ("mine:2", "mine.jsonl")]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{not json", "JSON object"),
        ("", "JSON object"),
        (b'{"id": "\xff"}', "UTF-8"),
        ("[1, 2]", "the line"),
        (line(id="b", messages=[{"role": "human", "content": "x"}]), "messages.0.role"),
        (line(id="b", messages=[{"role": "user"}]), "messages.0.content"),
        (line(id="b", messages=[{"role": "user", "content": ["x"]}]), "messages.0.content"),
        (line(id="b", messages=[{"role": "user", "content": "\ud800"}]), "surrogate"),
        (line(id="b", messages=[]), "messages"),
        (line(id="b", messages=None, conversations=[]), "messages"),
        (line(id="b", sorce="x"), "sorce"),
        (line(id=3), "id"),
        (line(id=None), "keys of line 1"),
        (line(id="b", temperature=0.5), "keys of line 1"),
        (line(), "here and on line 1"),
    ],
)
def test_one_bad_line_is_an_error_with_file_and_line(tmp_path: Path, bad, says):
    path = write(tmp_path / "c.jsonl", line(), bad, line(id="z"))
    with pytest.raises(UserError) as caught:
        read_conversations(path)
    assert says in caught.value.what
    assert caught.value.where == f"{path}:2"


def test_a_byte_order_mark_is_passed_over(tmp_path: Path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(line()).encode() + b"\r\n")
    assert len(read_conversations(path)) == 1


def test_empty_and_missing_files_are_errors(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    for name in ("empty.jsonl", "missing.jsonl", "."):
        with pytest.raises(UserError) as caught:
            load_prompts(PromptSettings(source=str(tmp_path / name)), Monitor())
        assert str(tmp_path) in caught.value.where


def test_conversations_nobody_asked_in_are_dropped_and_counted(tmp_path: Path):
    answer = {"role": "assistant", "content": "x"}
    path = write(
        tmp_path / "c.jsonl",
        line(id="1", messages=[{"role": "system", "content": "x"}]),
        line(id="2", messages=[answer, {"role": "user", "content": "x"}]),
        line(id="3"),
        line(id="4"),
        line(id="5"),
    )
    lines = Lines()
    settings = PromptSettings(source=str(path), max_prompts=2, deduplicate=False)
    taken = load_prompts(settings, lines)
    assert [c.id for c in taken] == ["3", "4"]
    assert sum("dropped 1 conversations" in said for said in lines.lines) == 2
    write(path, line(messages=[answer]))
    with pytest.raises(UserError, match="user turn"):
        load_prompts(PromptSettings(source=str(path)), lines)


@pytest.mark.parametrize("source", ["embedded", "embedded:heldout"])
def test_embedded_prompts_load_and_are_disjoint(source: str):
    lines = Lines()
    taken = load_prompts(PromptSettings(source=source), lines)
    assert len(taken) >= 128
    assert f"{len(taken):,}" in lines.lines[-1]
    other = load_prompts(
        PromptSettings(source="embedded" if source != "embedded" else "embedded:heldout"), lines
    )
    texts = {c.messages[-1]["content"] for c in taken}
    assert not texts & {c.messages[-1]["content"] for c in other}


def test_without_regeneration_answers_are_needed():
    asked = Conversation("a", [{"role": "user", "content": "x"}], "s")
    told = Conversation("b", [*asked.messages, {"role": "assistant", "content": "y"}], "s")
    lines = Lines()
    assert with_answers([asked, told], lines) == [told]
    assert "dropped 1 " in lines.lines[0]
    with pytest.raises(UserError, match="assistant turn"):
        with_answers([asked], lines)


def parts(*kinds: str) -> list[dict]:
    """A user turn of several parts, as chat APIs write it."""
    content = [
        {"type": kind, "text": f"said {i}. "} if kind == "text" else {"type": kind, kind: {"a": 1}}
        for i, kind in enumerate(kinds)
    ]
    return [{"role": "user", "content": content}]


def test_images_are_left_out_and_counted(tmp_path: Path):
    """Text in parts is text; what else there is cannot be drafted from."""
    path = write(
        tmp_path / "chat.jsonl",
        line(id="words", messages=parts("text", "text")),
        line(id="seen", messages=parts("text", "image_url")),
        line(id="seen too", messages=[*parts("image"), {"role": "assistant", "content": "a cat"}]),
        line(id="heard", messages=parts("input_audio", "image")),
        line(id="plain"),
    )
    lines = Lines()
    kept = load_prompts(PromptSettings(source=str(path)), lines)
    assert [c.id for c in kept] == ["words", "plain"]
    assert kept[0].messages == [{"role": "user", "content": "said 0. said 1. "}]
    why = "parts: drafting is for text"
    assert lines.lines == [
        f"prompts: dropped 1 conversations that have image and input_audio {why}",
        f"prompts: dropped 2 conversations that have image {why}",
        f"prompts: 2 conversations from {path}",
    ]


def test_nothing_but_images(tmp_path: Path):
    path = write(tmp_path / "chat.jsonl", line(messages=parts("image")))
    with pytest.raises(UserError, match="expected conversations of text"):
        load_prompts(PromptSettings(source=str(path)), Lines())


@pytest.mark.parametrize("content", [[{"text": "a"}], [{"type": "text"}], [], 5, [{"type": ""}]])
def test_parts_that_say_nothing_are_refused(content: object, tmp_path: Path):
    path = write(tmp_path / "chat.jsonl", line(messages=[{"role": "user", "content": content}]))
    with pytest.raises(UserError, match=r"chat.jsonl:1|content"):
        load_prompts(PromptSettings(source=str(path)), Lines())


def test_what_was_said_before_and_more_than_a_source_may_give_is_dropped(tmp_path: Path) -> None:
    ask = lambda text: [{"role": "user", "content": text}]  # noqa: E731
    answered = [*ask("one"), {"role": "assistant", "content": "1"}]
    lines = [
        ("a", ask("one")),
        ("b", ask("one")),  # said before, whoever says it
        ("a", answered),
        ("b", ask("two")),
        ("a", ask("three")),
        ("a", ask("one")),
        ("b", ask("four")),
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("".join(json.dumps({"messages": m, "source": s}) + "\n" for s, m in lines))
    for settings, kept, said in (
        ({}, [1, 3, 4, 5, 7], ["dropped 2 conversations that say the same as an earlier one"]),
        ({"deduplicate": False}, [1, 2, 3, 4, 5, 6, 7], []),
        (
            {"per_source": 2},
            [1, 3, 4, 7],
            ["dropped 1 conversations that are more of their", "dropped 2 conversations that say"],
        ),
        ({"per_source": 1, "deduplicate": False}, [1, 2], ["dropped 5 conversations"]),
        ({"per_source": 2, "max_prompts": 2}, [1, 3], ["dropped 1 conversations that say"]),
    ):
        heard = Lines()
        taken = load_prompts(PromptSettings(source=str(path), **settings), heard)
        assert [c.id for c in taken] == [f"p:{number}" for number in kept]
        told = [line for line in heard.lines if "dropped" in line]
        assert len(told) == len(said)
        assert all(part in line for part, line in zip(said, told, strict=True))
