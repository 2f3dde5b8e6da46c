"""Calibrations of decoded rows: one for each, of all its steps, and without a change of tokens."""

from __future__ import annotations

from typing import Any

from draftlab.evaluate.decoding_config import NamedHead
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.results import Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.head import DraftHead
from draftlab.heads.peagle import PeagleHead
from draftlab.target_model.model import Target
from tests.helpers.draft_blocks import explained
from tests.helpers.evaluation import suite
from tests.helpers.greedy_answers import STOPS
from tests.helpers.monitors import RecordingMonitor


def evaluate(
    target: Target, heads: dict[str, DraftHead], prompts: int, **settings: Any
) -> tuple[Report, list[str]]:
    monitor = RecordingMonitor()
    defaults = {"max_new_tokens": 24, "batch": 16, "timing_prompts": 0, "k": 3, "max_prompts": None}
    report = Evaluator(
        target,
        [NamedHead(name, head) for name, head in heads.items()],
        suite(prompts),
        STOPS,
        EvalSettings.model_validate(defaults | settings),
        monitor=monitor,
    ).run()
    return report, monitor.lines


def test_every_drafting_row_is_calibrated(
    target: Target,
    head: Eagle3Head,
    parallel_head: PeagleHead,
    block_heads: dict[str, BlockHead],
) -> None:
    heads = {"chain": head, "parallel": parallel_head} | block_heads
    report, _ = evaluate(target, heads, 24, calibrate=True)
    drafted = [row for row in report.rows if row.head]
    keys = ("engine", "head", "temperature", "k", "draft_probs", "suite", "suite_sha256")
    assert [[getattr(c, key) for key in keys] for c in report.calibrations] == [
        [getattr(row, key) for key in keys] for row in drafted
    ]
    for row, one in zip(drafted, report.calibrations, strict=True):
        assert one.blocks + one.fitted_blocks == row.drafts
        assert one.prompts == 12
        own = row.head in ("dspark", "causal")
        assert one.source == ("confidence head" if own else "draft probability")
        expected = row.temperature if row.draft_probs and row.temperature else 1.0
        assert one.confidence_temperature == (None if own else expected)
        assert one.head_sha256 is None  # it is in no folder
        for k, position in enumerate(one.positions):
            assert sum(b.count * b.observed for b in position.after) <= row.accepted_at[k] + 1e-6
            assert 0 <= position.error_after <= 1
    plain, _ = evaluate(target, {"chain": head}, 24)
    assert plain.calibrations == []
    expected = [row.counters for row in report.rows if row.head in (None, "chain")]
    assert [row.counters for row in plain.rows] == expected


def test_confidence_at_temperature_0_tells_what_is_accepted(
    target: Target, head: Eagle3Head
) -> None:
    report, _ = evaluate(target, {"chain": head}, 120, calibrate=True, temperatures=0)
    (one,) = report.calibrations
    first = one.positions[0]
    assert explained(first) > 0.05
    assert first.error_after < 2.8 * first.error_perfect


def test_too_few_steps_are_reported_and_left_out(target: Target, head: Eagle3Head) -> None:
    report, lines = evaluate(target, {"chain": head}, 4, calibrate=True, temperatures=0)
    assert report.calibrations == []
    (line,) = (line for line in lines if "not calibrated" in line)
    assert line.startswith("warning: chain, K=3, argmax drafts at T = 0 is not calibrated")
    assert "eval.max_prompts" in line
