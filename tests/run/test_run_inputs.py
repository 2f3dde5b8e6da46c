"""Inputs of a run: conversations are dropped or cut with a line, and mistakes are refused."""

from __future__ import annotations

import json
from pathlib import Path

from draftlab.store.store import Store
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import error_of, pipeline


def write_conversations(path: Path, *conversations: list[str]) -> str:
    """Write conversations of alternating user and assistant turns; return the override for them."""
    lines = [
        {
            "id": f"c{i}",
            "messages": [
                {"role": ("user", "assistant")[n % 2], "content": text}
                for n, text in enumerate(texts)
            ],
        }
        for i, texts in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"prompts.source={path.name}"


NO_REGENERATION = "regenerate.enabled=false"


def test_a_prompt_with_two_given_answers_is_answered_once(folder: Path) -> None:
    chats = ["def f(use):", "one"], ["def f(use):", "two"], ["def g(use):", "one"]
    source = write_conversations(folder / "twice.jsonl", *chats)
    for name, settings, count in (("own", (), 2), ("given", (NO_REGENERATION,), 3)):
        pipeline(f"name={name}", source, *settings).make("answers")
        assert len(Path(f"runs/{name}/answers.jsonl").read_text().splitlines()) == count


def test_conversations_without_an_answer_are_counted(folder: Path) -> None:
    some = write_conversations(
        Path("some.jsonl"), ["hi", "the user use"], ["hi"], ["a", "the on"], ["in"]
    )
    monitor = RecordingMonitor()
    pipeline(some, NO_REGENERATION, "name=other", monitor=monitor).make("store")
    assert "dropped 2 conversations without an assistant turn" in monitor.text
    assert len(Store.open(Path("runs/other/store"))) == 2


def test_mistakes_that_show_later_are_refused(folder: Path) -> None:
    Path("empty.jsonl").write_text("")
    assert "empty data set" in error_of("eval", "eval.suite=empty.jsonl").what
    error = str(error_of("head", "train.row_tokens=16", "name=other"))
    assert "16" in error
    assert "row_tokens" in error


def test_the_first_and_the_last_boundary_can_be_recorded(folder: Path) -> None:
    pipeline("record.boundaries=[0,4]", "name=other").make("head")
    config = json.loads(Path("runs/other/head/draftlab.json").read_text())
    assert config["boundaries"] == [0, 4]
