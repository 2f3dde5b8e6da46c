"""Inputs of a run: conversations are dropped or cut with a line, and mistakes are refused."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.small_run import pipeline


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


def test_the_first_and_the_last_boundary_can_be_recorded(folder: Path) -> None:
    pipeline("record.boundaries=[0,4]", "name=other").make("head")
    config = json.loads(Path("runs/other/head/draftlab.json").read_text())
    assert config["boundaries"] == [0, 4]
