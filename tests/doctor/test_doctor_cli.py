"""`draftlab doctor`: the verdict first, exit codes, JSON alone on stdout."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.helpers.small_run import draftlab, ran, snapshot

OPTIONS = ("--k", "2", "--device", "cpu", "--max-prompts", "8")


def test_diagnosis_of_a_runs_head_writes_nothing(folder: Path) -> None:
    before = snapshot(folder)
    result = draftlab(folder, "doctor", "small", *OPTIONS)
    assert result.exit_code == 1, result.output
    assert snapshot(folder) == before
    first = result.stdout.splitlines()[0]
    assert first.startswith("undecided: not enough prompts: ")  # there are eight
    assert "prompts of prompts.jsonl" in result.stdout  # those of the run's evaluation
    assert "target toy" in result.stdout

    head = folder / "runs" / "small" / "head"
    config = json.loads((head / "draftlab.json").read_text())
    config["max_position_embeddings"] = 128
    (head / "draftlab.json").write_text(json.dumps(config))
    result = draftlab(folder, "doctor", "runs/small/head", *OPTIONS, "--json")
    assert result.exit_code == 1
    diagnosis = json.loads(result.stdout)
    assert diagnosis["schema"] == 1
    assert not diagnosis["healthy"]
    assert diagnosis["state"] == "faulty"
    kinds = {f["kind"] for f in diagnosis["findings"]}
    assert kinds >= {"max_position_embeddings", "changed file"}
    assert diagnosis["readings"][0]["name"] == "as stored"


def test_a_run_without_a_suite_has_the_prompts_that_its_training_held_out(folder: Path) -> None:
    """As its evaluation has; the built-in prompts are for the built-in target."""
    path = folder / "runs" / "small" / "recipe.yaml"
    recipe = yaml.safe_load(path.read_text())
    recipe["eval"]["suite"] = None
    path.write_text(yaml.safe_dump(recipe))
    result = draftlab(folder, "doctor", "small", *OPTIONS, "--json")
    conditions = json.loads(result.stdout)["conditions"]
    assert (conditions["suite"], conditions["prompts"]) == ("held-out prompts of the run", 2)
    assert "doctor: the target answers: 2/2" in result.stderr
    named = draftlab(folder, "doctor", "small", *OPTIONS, "--prompts", "prompts.jsonl", "--json")
    assert json.loads(named.stdout)["conditions"]["suite"] == "prompts.jsonl"
    shutil.rmtree(folder / "runs" / "small" / "store")
    result = ran(folder, "doctor", "small", *OPTIONS, code=2)
    assert "--prompts of the doctor" in " ".join(result.output.split())


def test_every_fault_of_a_runs_files_is_reported_without_answers(folder: Path) -> None:
    """The prompts are too few to score a head, and draftlab.json is missing."""
    head = folder / "runs" / "small" / "head"
    (head / "draftlab.json").unlink()
    weights = bytearray((head / "model.safetensors").read_bytes())
    weights[-1] ^= 0x40
    (head / "model.safetensors").write_bytes(weights)
    short = ("--max-prompts", "2", "--max-new-tokens", "8", "--k", "8")
    result = draftlab(folder, "doctor", "small", "--device", "cpu", *short)
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("faulty: ")
    assert "draftlab.json is missing; the run wrote one" in result.stdout
    assert "model.safetensors has SHA-256" in result.stdout
    assert "note: not scored: expected answers with places to draft 8 tokens" in result.stdout


def test_an_export_of_a_run_has_the_runs_target(folder: Path) -> None:
    assert draftlab(folder, "export", "--run", "small", "--to", "vllm").exit_code == 0
    result = draftlab(folder, "doctor", "runs/small/export/vllm", *OPTIONS, "--json")
    assert result.exit_code == 1, result.output
    diagnosis = json.loads(result.stdout)
    assert (diagnosis["layout"], diagnosis["target"]) == ("native", "toy")
    result = draftlab(folder, "doctor", "small", *OPTIONS, "--json")
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
    folder: Path, arguments: tuple[str, ...], message: str
) -> None:
    headless = folder / "runs" / "headless"
    headless.mkdir()
    (headless / "recipe.yaml").write_text("target: toy\n")
    shutil.copytree(folder / "runs" / "small" / "head", folder / "head")
    result = ran(folder, "doctor", *arguments, code=2)
    assert re.search(message, result.output.replace("\n", " "))
