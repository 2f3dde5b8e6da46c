"""`draftlab run`, `prepare`, `record` and `train`: artefacts, plans, changed settings, --force."""

from __future__ import annotations

import gc
import json
import re
from pathlib import Path

import pytest
import yaml

from draftlab.evaluate.results import Report
from draftlab.pipeline.pipeline import Pipeline
from tests.helpers.small_run import draftlab, finished, half_written, ran, refused, snapshot

THERE = [f"{s}: there" for s in ("answers", "store", "head", "eval", "export")]


def test_a_run_writes_all_artefacts() -> None:
    run = finished() / "runs" / "small"
    expected = (
        "answers.jsonl recipe.yaml provenance.json store/manifest.json train/metrics.jsonl "
        "head/draftlab.json head/model.safetensors head/config.json eval/report.json "
        "eval/report.html export/speculators/config.json export/speculators/model.safetensors"
    )
    assert [name for name in expected.split() if not (run / name).is_file()] == []
    assert (run.parent / "latest").resolve() == run.resolve()
    assert half_written(run) == []
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["target"] == "toy"
    assert "prompts.sha256" in provenance["inputs"]["answers"]
    rows = Report.read(run / "eval" / "report.json").rows
    assert {(row.temperature, row.drafter) for row in rows} == {
        (t, d) for t in (0.0, 0.8) for d in ("none", "chain")
    }
    assert {row.prompts for row in rows} == {3}


def test_collections_skip_what_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """While stages run, and not afterwards: a caller of the command has objects of its own."""
    gc.unfreeze()  # what tests have frozen
    frozen: list[int] = []
    monkeypatch.setattr(Pipeline, "make", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    draftlab(finished(), "train", "small.yaml")
    assert frozen[0] > 10_000
    assert gc.get_freeze_count() == 0
    gc.freeze()
    draftlab(finished(), "train", "small.yaml")
    assert gc.get_freeze_count() > 10_000  # what the caller has frozen stays so


def test_a_complete_run_is_not_run_again() -> None:
    before = snapshot(finished() / "runs")
    result = ran(finished(), "run", "small.yaml")
    output = [line for line in result.stderr.splitlines() if ": there" in line]
    assert [line.partition(" (")[0] for line in output] == THERE
    assert "acceptance" in result.stdout  # the table is shown again
    assert snapshot(finished() / "runs") == before
    for verb in ("train", "record", "prepare"):
        assert draftlab(finished(), verb, "small.yaml").exit_code == 0
    assert snapshot(finished() / "runs") == before


def test_plan_prints_stages_and_writes_nothing() -> None:
    before = snapshot(finished())
    done = draftlab(finished(), "run", "small.yaml", "--plan")
    assert done.stdout.startswith("run folder: ")
    assert done.stdout.count("nothing to do") == 5
    shown = draftlab(finished(), "recipe", "show", "small.yaml").stdout
    assert yaml.safe_load(shown)["train"]["steps"] == 6
    assert "clip: 0.5" in " ".join(shown.split())  # defaults, too
    change = ("run", "small.yaml", "train.steps=7", "eval.seed=1", "--plan")
    changed = ran(finished(), *change)
    assert "head     settings changed: train.steps 6 → 7\n" in changed.stdout
    assert "eval     settings changed: eval.seed 0 → 1\n" in changed.stdout
    assert "refused: --force runs head and all later stages again" in changed.stdout
    forced = draftlab(finished(), *change, "--force").stdout
    assert "head     would run again, settings changed: train.steps 6 → 7\n" in forced
    assert "export   would run again, an earlier stage changed\n" in forced
    assert "refused" not in forced
    other = draftlab(finished(), "train", "small.yaml", "name=other", "--plan")
    assert other.stdout.count("would run") == 3
    assert "eval " not in other.stdout.partition("run folder")[2]
    settings = ("name=other", "prompts.source=no.jsonl", "--plan")
    lacking = draftlab(finished(), "train", "small.yaml", *settings)
    assert "answers  would run; it needs no.jsonl, which is not there yet\n" in lacking.stdout
    assert lacking.exit_code == 2
    assert snapshot(finished()) == before
    assert not (finished() / "runs" / "other").exists()


def test_a_run_warns_as_its_plan_does(folder: Path) -> None:
    arguments = ("run", "small.yaml", "name=other", "train.row_tokens=8")
    warning = "warning: the longest conversation may have"
    assert warning in draftlab(folder, *arguments, "--plan").output
    assert warning in draftlab(folder, *arguments).output


def test_a_changed_setting_is_refused_by_name() -> None:
    before = snapshot(finished() / "runs")
    output = refused(finished(), "run", "small.yaml", "train.steps=7", "record.dtype=float32")
    assert "stage 'store'" in output
    assert "record.dtype: 'bfloat16' in the run, 'float32' now" in output
    output = refused(finished(), "train", "small.yaml", "train.steps=7")
    assert "train.steps: 6 in the run, 7 now" in output
    assert "--force" in output
    assert "name=other" in output
    assert snapshot(finished() / "runs") == before


def test_force_runs_only_changed_and_later_stages_again(folder: Path) -> None:
    run = folder / "runs" / "small"
    before = snapshot(run)
    ran(folder, "run", "small.yaml", "train.steps=7", "--force")
    after = snapshot(run)
    unchanged = [n for n in before if n.startswith(("answers", "store/", "stages/answers"))]
    assert unchanged
    assert {n: after[n] for n in unchanged} == {n: before[n] for n in unchanged}
    for name in ("head/model.safetensors", "eval/report.json", "export/speculators/config.json"):
        assert after[name] != before[name]
    steps = [json.loads(x) for x in (run / "train" / "metrics.jsonl").read_text().splitlines()]
    assert [s["step"] for s in steps if "loss" in s] == list(range(1, 8))
    assert yaml.safe_load((run / "recipe.yaml").read_text())["train"]["steps"] == 7
    assert draftlab(folder, "train", "small.yaml", "train.steps=7").exit_code == 0
    refused(folder, "train", "small.yaml")


def test_a_changed_prompt_file_is_refused(folder: Path) -> None:
    prompts = folder / "prompts.jsonl"
    text = prompts.read_text()
    prompts.write_text(text.replace("def f3", "def g3"))
    assert re.search(
        r"prompts.sha256: '\w{12}…' in the run, ", refused(folder, "train", "small.yaml")
    )
    plan = draftlab(folder, "train", "small.yaml", "--plan").stdout
    assert re.search(r"prompts.sha256 '\w{12}…' → '\w{12}…'", plan)
    assert max(map(len, plan.splitlines())) <= 80
    prompts.write_text(text)
    assert draftlab(folder, "train", "small.yaml").exit_code == 0
