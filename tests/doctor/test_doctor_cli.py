"""`draftlab doctor`: the verdict first, exit codes, JSON alone on stdout."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from draftlab.doctor.diagnosis import Diagnosis, fault, print_diagnosis
from tests.helpers.small_run import copy_of_finished, draftlab, snapshot

OPTIONS = ("--k", "2", "--device", "cpu", "--max-prompts", "8")


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path / "workspace")


def test_diagnosis_of_a_runs_head_writes_nothing(workspace: Path) -> None:
    before = snapshot(workspace)
    result = draftlab(workspace, "doctor", "small", *OPTIONS)
    assert result.exit_code == 1, result.output
    assert snapshot(workspace) == before
    first = result.stdout.splitlines()[0]
    assert first.startswith("undecided: not enough prompts: ")  # there are eight
    assert "prompts of prompts.jsonl" in result.stdout  # those of the run's evaluation
    assert "target toy" in result.stdout

    head = workspace / "runs" / "small" / "head"
    config = json.loads((head / "draftlab.json").read_text())
    config["max_position_embeddings"] = 128
    (head / "draftlab.json").write_text(json.dumps(config))
    result = draftlab(workspace, "doctor", "runs/small/head", *OPTIONS, "--json")
    assert result.exit_code == 1
    diagnosis = json.loads(result.stdout)
    assert diagnosis["schema"] == 1
    assert not diagnosis["healthy"]
    assert diagnosis["state"] == "faulty"
    kinds = {f["kind"] for f in diagnosis["findings"]}
    assert kinds >= {"max_position_embeddings", "changed file"}
    assert diagnosis["readings"][0]["name"] == "as stored"


def test_a_run_without_a_suite_has_the_prompts_that_its_training_held_out(workspace: Path) -> None:
    """As its evaluation has; the built-in prompts are for the built-in target."""
    path = workspace / "runs" / "small" / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["eval"]["suite"] = None
    path.write_text(yaml.safe_dump(recipe))
    result = draftlab(workspace, "doctor", "small", *OPTIONS, "--json")
    conditions = json.loads(result.stdout)["conditions"]
    assert (conditions["suite"], conditions["prompts"]) == ("held-out prompts of the run", 2)
    assert "doctor: the target answers: 2/2" in result.stderr
    named = draftlab(workspace, "doctor", "small", *OPTIONS, "--prompts", "prompts.jsonl", "--json")
    assert json.loads(named.stdout)["conditions"]["suite"] == "prompts.jsonl"
    shutil.rmtree(workspace / "runs" / "small" / "store")
    result = draftlab(workspace, "doctor", "small", *OPTIONS)
    assert result.exit_code == 2
    assert "--prompts of the doctor" in " ".join(result.output.split())


def test_lines_wrap_on_a_terminal_alone() -> None:
    diagnosis = Diagnosis(
        healthy=False,
        state="faulty",
        verdict="a fault of many words " * 8,
        head="runs/small/head",
        layout="draftlab",
        target="a/long/way/" * 8 + "to a target",
        conditions={},
        findings=[fault("shape", "a fault of many words " * 8, "what to do about it " * 8)],
        readings=[],
    )
    for terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
        print_diagnosis(diagnosis, console)
        printed = console.file.getvalue().splitlines()
        assert (max(map(len, printed)) <= 80) == terminal
        assert (len(printed) == 5) != terminal


def test_every_fault_of_a_runs_files_is_reported_without_answers(workspace: Path) -> None:
    """The prompts are too few to score a head, and draftlab.json is missing."""
    head = workspace / "runs" / "small" / "head"
    (head / "draftlab.json").unlink()
    weights = bytearray((head / "model.safetensors").read_bytes())
    weights[-1] ^= 0x40
    (head / "model.safetensors").write_bytes(weights)
    short = ("--max-prompts", "2", "--max-new-tokens", "8", "--k", "8")
    result = draftlab(workspace, "doctor", "small", "--device", "cpu", *short)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("faulty: ")
    assert "draftlab.json is missing; the run wrote one" in result.stdout
    assert "model.safetensors has SHA-256" in result.stdout
    assert "note: not scored: expected answers with places to draft 8 tokens" in result.stdout


def test_an_export_of_a_run_has_the_runs_target(workspace: Path) -> None:
    assert draftlab(workspace, "export", "--run", "small", "--to", "vllm").exit_code == 0
    result = draftlab(workspace, "doctor", "runs/small/export/vllm", *OPTIONS, "--json")
    assert result.exit_code == 1, result.output
    diagnosis = json.loads(result.stdout)
    assert (diagnosis["layout"], diagnosis["target"]) == ("native", "toy")
    result = draftlab(workspace, "doctor", "small", *OPTIONS, "--json")
    head = json.loads(result.stdout)
    assert diagnosis["state"] == head["state"] == "undecided"
    assert [f["kind"] for f in diagnosis["findings"]] == ["not enough prompts"]
    assert [f["what"] for f in diagnosis["findings"]] == [f["what"] for f in head["findings"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "head.*found none"),
        (("prompts.jsonl",), "head.*found a file"),
        (("runs/headless",), "run.*trained head, found none"),
        (("head",), "expected --target.*trained for 'toy'"),
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
    shutil.copytree(workspace / "runs" / "small" / "head", workspace / "head")
    result = draftlab(workspace, "doctor", *arguments)
    assert result.exit_code == 2, result.output
    assert re.search(message, result.output.replace("\n", " "))
