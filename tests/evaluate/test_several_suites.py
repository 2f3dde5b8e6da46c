"""Several suites in one evaluation, and the categories of a suite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.report.html import render_html
from draftlab.report.sections import sections
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite
from tests.helpers.evaluation import evaluate, suite
from tests.helpers.greedy_answers import STOPS, requests

SETTINGS = {
    "k": [1, 3], "temperatures": [0, 0.8], "draft_probs": "off", "max_new_tokens": 16, "batch": 4,
    "timing_prompts": 6, "timing_tokens": 16,
}  # fmt: skip


def two_suites() -> list[Suite]:
    other = tuple((r.id, r.prompt_ids) for r in requests(8, seed=3))
    first = suite()
    return [
        replace(first, categories={i: "ab"[n % 2] for n, (i, _) in enumerate(first.prompts[:5])}),
        Suite("folder/second.jsonl", "t", other),
    ]


@pytest.fixture(scope="module")
def report(target: Target, head: Eagle3Head) -> Report:
    return Evaluator(
        target, [NamedHead("a head", head)], two_suites(), STOPS,
        EvalSettings.model_validate(SETTINGS), monitor=Monitor(),
    ).run()  # fmt: skip


def test_each_suite_has_the_rows_that_it_has_alone(
    report: Report, target: Target, head: Eagle3Head
) -> None:
    alone = evaluate(target, head, **SETTINGS)
    assert [row.suite for row in report.rows] == ["toy"] * 6 + ["folder/second.jsonl"] * 6
    for row, other in zip(report.rows[:6], alone.rows, strict=True):
        assert (row.k, row.temperature, row.counters) == (
            other.k,
            other.temperature,
            other.counters,
        )
    assert [row.prompts for row in report.rows] == [6] * 6 + [8] * 6
    levels = {row.self_check.level for row in report.rows if row.k and row.temperature}
    assert levels == {1e-3 / 4}  # one level for all rows of the report


def test_each_suite_has_its_advice(report: Report) -> None:
    advice = report.adviser["advice"]
    rows = {(r.suite, r.temperature, r.k): r for r in report.rows if r.k}
    for one in advice:
        for k in (1, 3):
            own = rows[one["suite"], one["temperature"], k]
            prediction = one["predictions"][k - 1]
            assert prediction["tokens_per_step"] == pytest.approx(own.tokens_per_step)
            assert prediction["speedup"] == own.speedup
            assert prediction["speedup_ci"] == own.speedup_ci


def test_categories_divide_the_counters_of_a_row(report: Report) -> None:
    for row in report.rows:
        if not row.k or row.suite != "toy":
            assert row.categories == []
            continue
        assert [(c.category, c.prompts) for c in row.categories] == [
            ("a", 3), ("b", 2), ("other", 1),
        ]  # fmt: skip
        for name in ("drafts", "accepted", "output_tokens", "draft_tokens"):
            assert sum(getattr(c, name) for c in row.categories) == getattr(row, name)
        for one in row.categories:
            assert one.acceptance_length == 1 + one.accepted / one.drafts
            assert one.acceptance_length_ci is None  # too few prompts
            if row.speedup is None:  # disturbed
                continue
            steps = one.drafts + one.undrafted_steps
            tokens = (one.output_tokens - one.prompts) / steps
            timing = row.timings[0]
            ratio = max(timing.step_ms / timing.baseline_tpot_ms, 1.0)
            assert one.speedup == pytest.approx(tokens / ratio)


def test_lengths_of_prompts_are_categories(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prompts come first in the suite, and last in the report."""
    monkeypatch.setattr("draftlab.text.suites.SHORT", 8)
    prompts = [
        (id_, (ids * 17)[: 17 if n < 2 else 8]) for n, (id_, ids) in enumerate(suite().prompts)
    ]
    mixed = Suite("toy", "t", tuple(prompts), {prompts[0][0]: "old"})
    changes = {"k": 3, "temperatures": 0, "timing_prompts": 0, "by_length": True}
    options = EvalSettings.model_validate(SETTINGS | changes)
    report = Evaluator(
        target, [NamedHead("h", head)], mixed, STOPS, options, monitor=Monitor()
    ).run()
    row = report.rows[-1]
    names = [("up to 8 tokens", len(prompts) - 2), ("17 to 32 tokens", 2)]
    assert [(one.category, one.prompts) for one in row.categories] == names
    assert "17 to 32 tokens" in render_html(sections(report))


def test_calibration_wants_one_suite() -> None:
    EvalSettings.model_validate({"suite": "humaneval", "calibrate": True})
    with pytest.raises(ValueError, match="expected one suite, found 2"):
        EvalSettings.model_validate({"suite": ["mt-bench", "humaneval"], "calibrate": True})


@pytest.mark.parametrize(
    ("idle", "effective"),
    [
        ({"verification": "block", "temperatures": 0}, {"temperatures": 1}),
        ({"verification": "block", "draft_probs": "off"}, {"draft_probs": "both"}),
        ({"top_k": 5, "temperatures": 0}, {"temperatures": [0, 0.8]}),
        ({"top_p": 0.5, "temperatures": 0}, {"temperatures": [0, 0.8]}),
    ],
)
def test_a_setting_without_effect_is_refused(
    idle: dict[str, Any], effective: dict[str, Any]
) -> None:
    name = next(iter(idle))
    with pytest.raises(ValueError, match=f"{name} has no effect: no row samples its"):
        EvalSettings.model_validate(idle)
    EvalSettings.model_validate(idle | effective)
