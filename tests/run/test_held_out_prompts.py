"""A run without a suite is evaluated on the prompts that its training never saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftlab import Monitor, load_recipe
from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.run import held_out_prompts as run_prompts
from draftlab.run.api import HELD_OUT, evaluate_head
from draftlab.run.held_out_prompts import check_suite, default_suite, held_out_prompts
from draftlab.store.store import Store
from draftlab.target_model.settings import TargetSettings
from draftlab.text.suites import prompt_digest
from draftlab.train.validation import split_records
from tests.helpers.small_run import draftlab, ran


def without_suite(folder: Path) -> None:
    """Take the suite out of the recipe of the finished run."""
    text = (folder / "small.yaml").read_text().replace("  suite: prompts.jsonl\n", "")
    (folder / "small.yaml").write_text(text)


def trained_prompts(folder: Path) -> set[str]:
    recipe = load_recipe(folder / "small.yaml")
    store = Store.open(folder / "runs" / "small" / "store")
    training, held_out = split_records(store, recipe.train, recipe.seed, Monitor())
    assert held_out
    return {store.ids[int(number)].partition("~")[0] for number in training}


def test_held_out_prompts_were_not_trained_on(folder: Path) -> None:
    recipe = load_recipe(folder / "small.yaml")
    found = held_out_prompts(recipe, folder / "runs" / "small")
    names = [one.id.partition("~")[0] for one in found]
    assert found
    assert len(set(names)) == len(names)
    assert not {*names} & trained_prompts(folder)


def test_a_run_without_a_suite_says_which_prompts_it_takes(folder: Path) -> None:
    without_suite(folder)
    result = ran(folder, "run", "small.yaml")
    assert "prompts that training held out, since eval.suite names none" in result.output
    rows = Report.read(folder / "runs" / "small" / "eval" / "report.json").rows
    assert {row.suite for row in rows} == {HELD_OUT}
    for head in (("--run", "small"), ("--head", "runs/small/head", "--timing-prompts", "0")):
        ran(folder, "eval", *head, "--max-new-tokens", "8", "--out", "elsewhere")
        report = Report.read(folder / "elsewhere" / "report.json")
        assert {row.suite for row in report.rows} == {HELD_OUT}


def test_only_the_built_in_target_has_built_in_prompts(folder: Path, tmp_path: Path) -> None:
    assert default_suite(TargetSettings(path="embedded")) == ("embedded:heldout",)
    assert default_suite(TargetSettings(path="toy")) == ()
    head = folder / "head"  # outside its run
    (folder / "runs" / "small" / "head").rename(head)
    with pytest.raises(UserError, match="expected a suite of prompts, found none") as error:
        evaluate_head(TargetSettings(path="toy"), head, EvalSettings(), tmp_path, monitor=Monitor())
    assert "--suite" in error.value.do


def test_a_recipe_that_holds_nothing_out_has_to_name_prompts(folder: Path) -> None:
    without_suite(folder)
    nothing = ["train.validation_share=0"]
    with pytest.raises(UserError, match="found a share of 0"):
        check_suite(load_recipe(folder / "small.yaml", nothing))
    named = [*nothing, "eval.suite=prompts.jsonl"]
    check_suite(load_recipe(folder / "small.yaml", named))
    plan = ran(folder, "run", "small.yaml", *nothing, "name=other", "--plan", code=2)
    assert "expected prompts to evaluate" in plan.output


def test_a_suite_that_training_saw_is_named(folder: Path) -> None:
    run, recipe = folder / "runs" / "small", load_recipe(folder / "small.yaml")
    trained, held_out = run_prompts.trained_prompts(recipe, run), held_out_prompts(recipe, run)
    assert len(trained) == len(trained_prompts(folder))
    assert not trained & set(map(prompt_digest, held_out))
    result = draftlab(folder, "eval", "--run", "small", "--max-prompts", "12", "--out", "seen")
    assert f"small was trained on {len(trained)} of the 12 prompts" in result.output
    report = Report.read(folder / "seen" / "report.json")
    assert all(any("trained on" in text for text in row.warnings) for row in report.rows[1:2])
    (run / "answers.jsonl").unlink()
    assert not run_prompts.trained_prompts(recipe, run)
