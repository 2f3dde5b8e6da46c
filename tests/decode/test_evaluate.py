"""Evaluation: rows that stand alone, and figures that follow from their counters."""

from __future__ import annotations

import pytest
import torch

from draftlab.base import Monitor, UserError
from draftlab.decode.evaluate import EvalKnobs, Evaluator, Suite, environment
from draftlab.decode.measure import one_thread
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.results import Report
from draftlab.target.model import Target
from tests.decode.answers import STOPS, requests


def suite(count: int = 6) -> Suite:
    return Suite("toy", "t", tuple((r.id, r.prompt_ids) for r in requests(count, seed=30)))


def evaluate(target: Target, head: Eagle3Head | None, **knobs: object) -> Report:
    fields = {"max_new_tokens": 16, "batch": 4, "timing_prompts": 2, "timing_tokens": 8}
    evaluator = Evaluator(
        target,
        head,
        "a head" if head else None,
        suite(),
        STOPS,
        EvalKnobs.model_validate(fields | knobs),
        monitor=Monitor(),
    )
    return evaluator.run()


def test_rows_of_every_temperature_and_mode(target: Target, head: Eagle3Head, tmp_path) -> None:
    report = evaluate(target, head)
    rows = report.rows
    assert [(r.temperature, r.drafter, r.draft_probs) for r in rows] == [
        (0.0, "none", False),
        (0.0, "chain", False),
        (0.8, "none", False),
        (0.8, "chain", False),
        (0.8, "chain", True),
    ]
    for row in rows:
        row.counters.check_tokens(row.output_tokens, row.prompts)
        assert (row.prompts, row.max_new_tokens, row.batch) == (6, 16, 4)
        assert row.suite_sha256 == suite().sha256
        assert row.tpot_ms is not None
        assert row.ttft_ms is not None
        if row.drafter == "none":
            assert (row.head, row.k, row.drafts, row.speedup) == (None, 0, 0, None)
            assert row.acceptance_length is row.expected_acceptance is None
            assert row.undrafted_steps > 0
        else:
            assert (row.head, row.k, row.k_trained) == ("a head", 3, 3)
            plain = next(r for r in rows if r.temperature == row.temperature)
            assert row.baseline_tpot_ms == plain.tpot_ms
            assert row.speedup == pytest.approx(row.baseline_tpot_ms / row.tpot_ms)
            assert row.acceptance_length == 1 + row.accepted / row.drafts
            assert any("prompts are few" in warning for warning in row.warnings)
            # Probabilities are of what was drafted: unconditional, so they fall with depth.
            assert row.expected_acceptance == sorted(row.expected_acceptance, reverse=True)
    greedy = rows[1]
    assert greedy.prompts_equal == 1.0
    assert greedy.lossless.level == "L2"
    assert greedy.expected_acceptance == pytest.approx(
        [a / greedy.drafts for a in greedy.accepted_at]
    )
    assert rows[3].lossless is None
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json").rows == rows


def test_counters_do_not_depend_on_the_batch(target: Target, head: Eagle3Head) -> None:
    one, six = (
        evaluate(target, head, batch=batch, timing_prompts=0, temperatures=(0.8,), draft_probs="on")
        for batch in (1, 6)
    )
    assert [r.counters for r in one.rows] == [r.counters for r in six.rows]
    assert {(r.tpot_ms, r.speedup, r.step_ms) for r in one.rows} == {(None, None, None)}
    assert one.environment["timing"] is None


def test_without_a_head_only_plain_rows(target: Target) -> None:
    report = evaluate(target, None, timing_prompts=0, max_prompts=2)
    assert [(r.drafter, r.prompts) for r in report.rows] == [("none", 2), ("none", 2)]


def test_a_k_beyond_training_is_said(target: Target, head: Eagle3Head) -> None:
    report = evaluate(target, head, k=4, timing_prompts=0, temperatures=(0.0,))
    assert report.rows[1].k == 4
    assert "K = 4 exceeds the 3 steps of training" in report.rows[1].warnings


def test_an_empty_suite_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="expected prompts to evaluate, found none"):
        Evaluator(target, None, None, suite(0), STOPS, EvalKnobs(), monitor=Monitor())


def test_one_thread_inside_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_environment_names_what_ran() -> None:
    found = environment(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["device"].startswith("cpu")
