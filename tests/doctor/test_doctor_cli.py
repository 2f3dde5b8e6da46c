"""`draftlab doctor`: the verdict first, exit codes, JSON alone on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.small_run import copy_of_finished, draftlab, snapshot

OPTIONS = ("--target", "toy", "--prompts", "prompts.jsonl", "--k", "2", "--device", "cpu")


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path / "workshop")


def test_a_runs_head_is_examined_and_nothing_is_written(workshop: Path) -> None:
    before = snapshot(workshop)
    result = draftlab(workshop, "doctor", "small", *OPTIONS)
    # Six steps of training make no head, and training says so itself.
    assert result.exit_code == 0, result.output
    assert snapshot(workshop) == before
    first = result.stdout.splitlines()[0]
    assert first.startswith("healthy: ")
    assert first.endswith("; hardly trained")
    assert "of first drafts are accepted" in result.stdout
    assert "as stored" in result.stdout

    head = workshop / "runs" / "small" / "head"
    config = json.loads((head / "draftlab.json").read_text())
    config["max_position_embeddings"] = 128
    (head / "draftlab.json").write_text(json.dumps(config))
    result = draftlab(workshop, "doctor", "runs/small/head", *OPTIONS, "--json")
    assert result.exit_code == 1
    diagnosis = json.loads(result.stdout)
    assert diagnosis["schema"] == 1
    assert not diagnosis["healthy"]
    assert {f["kind"] for f in diagnosis["findings"]} >= {"max_position_embeddings", "config.json"}
    assert diagnosis["readings"][0]["name"] == "as stored"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nowhere",), "expected a head's folder, found none"),
        (("prompts.jsonl",), "expected a head's folder, found a file"),
        (("runs/headless",), "expected the run to have a trained head, found none"),
        (("runs/small",), "expected --target beside the head (it was trained for toy)"),
        (("runs/small", "--target", "nothing/there/at-all"), "config.json"),
        (("runs/small", "--target", "toy", "--max-prompts", "1"), "--max-prompts: expected"),
        (("runs/small", "--target", "toy", "--prompts", "none.jsonl"), "prompt suite"),
    ],
)
def test_mistakes_of_the_command_line(
    workshop: Path, arguments: tuple[str, ...], says: str
) -> None:
    headless = workshop / "runs" / "headless"
    headless.mkdir()
    (headless / "recipe.yaml").write_text("target: toy\n")
    result = draftlab(workshop, "doctor", *arguments)
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
