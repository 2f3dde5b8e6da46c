"""`draftlab doctor`: the verdict first, exit codes, JSON alone on stdout."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.small_run import copy_of_finished, draftlab, snapshot

OPTIONS = ("--target", "toy", "--prompts", "prompts.jsonl", "--k", "2", "--device", "cpu")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path / "workspace")


def test_diagnosis_of_a_runs_head_writes_nothing(workspace: Path) -> None:
    before = snapshot(workspace)
    result = draftlab(workspace, "doctor", "small", *OPTIONS)
    # After six steps of training validation measures hardly any accuracy either.
    assert result.exit_code == 0, result.output
    assert snapshot(workspace) == before
    first = result.stdout.splitlines()[0]
    assert first.startswith("healthy: ")
    assert first.endswith("; hardly trained")
    assert "of first drafts are accepted" in result.stdout
    assert "as stored" in result.stdout

    head = workspace / "runs" / "small" / "head"
    config = json.loads((head / "draftlab.json").read_text())
    config["max_position_embeddings"] = 128
    (head / "draftlab.json").write_text(json.dumps(config))
    result = draftlab(workspace, "doctor", "runs/small/head", *OPTIONS, "--json")
    assert result.exit_code == 1
    diagnosis = json.loads(result.stdout)
    assert diagnosis["schema"] == 1
    assert not diagnosis["healthy"]
    assert {f["kind"] for f in diagnosis["findings"]} >= {"max_position_embeddings", "config.json"}
    assert diagnosis["readings"][0]["name"] == "as stored"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "head.*found none"),
        (("prompts.jsonl",), "head.*found a file"),
        (("runs/headless",), "run.*trained head, found none"),
        (("runs/small",), "expected --target.*trained for toy"),
        (("runs/small", "--target", "nothing/there/at-all"), r"config\.json"),
        (("runs/small", "--target", "toy", "--max-prompts", "1"), "--max-prompts: expected"),
        (("runs/small", "--target", "toy", "--prompts", "none.jsonl"), "prompt suite"),
    ],
)
def test_mistakes_of_the_command_line(
    workspace: Path, arguments: tuple[str, ...], message: str
) -> None:
    headless = workspace / "runs" / "headless"
    headless.mkdir()
    (headless / "recipe.yaml").write_text("target: toy\n")
    result = draftlab(workspace, "doctor", *arguments)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output.replace("\n", " "))
