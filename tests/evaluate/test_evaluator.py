"""Evaluation: self-contained rows, and metrics that follow from their counters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from draftlab.evaluate.certificate import certify as certify_module
from draftlab.evaluate.evaluator import Evaluator
from draftlab.evaluate.results import Report, Timing
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import one_thread, timing_batches
from draftlab.evaluate.warnings import row_warnings
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from tests.helpers import sample_report as sample
from tests.helpers.evaluation import HEAD_NAMES, evaluate, suite
from tests.helpers.greedy_answers import STOPS, requests
from tests.helpers.monitors import RecordingMonitor


def test_rows_have_conditions_counters_and_times(
    target: Target, head: Eagle3Head, tmp_path: Path
) -> None:
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
            assert any("few prompts (6)" in warning for warning in row.warnings)
            # The expectations are unconditional, so they fall with the position.
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


def test_without_a_head_there_are_only_plain_rows(target: Target) -> None:
    report = evaluate(target, timing_prompts=0, max_prompts=2)
    assert [(r.drafter, r.prompts) for r in report.rows] == [("none", 2), ("none", 2)]


def test_a_k_beyond_training_is_warned_of_before_decoding(target: Target, head: Eagle3Head) -> None:
    class StopAtFirstProgress(RecordingMonitor):
        def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
            raise InterruptedError

    monitor = StopAtFirstProgress()
    with pytest.raises(InterruptedError):
        evaluate(target, head, k=[3, 4], monitor=monitor)
    (line,) = (line for line in monitor.lines if "exceeds" in line)
    assert line.startswith("warning: a head: K = 4 exceeds the 3 steps of training")
    report = evaluate(target, head, k=[3, 4], timing_prompts=0, temperatures=0)
    assert [any("exceeds" in text for text in row.warnings) for row in report.rows] == [
        False, False, True,
    ]  # fmt: skip


def test_an_empty_suite_is_refused(target: Target) -> None:
    with pytest.raises(UserError, match="expected prompts to evaluate, found none"):
        Evaluator(target, [], suite(0), STOPS, EvalSettings(), monitor=Monitor())


def test_one_thread_inside_the_block_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread(torch.device("cpu")):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def configs(report: Report) -> list[tuple[float, str | None, int, bool]]:
    return [(r.temperature, r.head, r.k, r.draft_probs) for r in report.rows]


def test_every_configuration_has_a_row_and_plain_decoding_one_per_temperature(
    target: Target, head: Eagle3Head
) -> None:
    report = evaluate(target, head, head, k=[1, 3, 1], temperatures=[0, 0.8], timing_prompts=0)
    assert configs(report) == [
        (0.0, None, 0, False),
        *[(0.0, name, k, False) for name in HEAD_NAMES for k in (1, 3)],
        (0.8, None, 0, False),
        *[(0.8, name, k, probs) for name in HEAD_NAMES for k in (1, 3) for probs in (False, True)],
    ]
    rows = report.rows
    # the same head under two names counts alike; its first drafts do not depend on K at T = 0
    assert rows[1].counters == rows[3].counters
    assert rows[1].accepted_at[0] > 0
    assert report.adviser is None


def test_rows_below_greedy_below_draft_greedily(target: Target, head: Eagle3Head) -> None:
    settings = {"temperatures": [0.5, 1.0], "draft_probs": "both", "timing_prompts": 0}
    report = evaluate(target, head, greedy_below=0.8, **settings)
    assert [(t, probs) for t, name, _, probs in configs(report) if name] == [
        (0.5, False), (1.0, False), (1.0, True),
    ]  # fmt: skip
    plain = evaluate(target, head, **settings)
    assert [r.counters for r in report.rows if r.temperature == 0.5] == [
        r.counters for r in plain.rows if r.temperature == 0.5 and not r.draft_probs
    ]


def test_every_batch_is_timed_and_the_adviser_covers_every_k(
    target: Target, head: Eagle3Head
) -> None:
    report = evaluate(target, head, k=3, temperatures=0, timing_batches=[1, 3])
    plain, drafted = report.rows
    assert [(t.batch, t.prompts) for t in drafted.timings] == [(1, 2), (3, 3)]
    first = drafted.timings[0]
    assert (drafted.tpot_ms, drafted.speedup) == (first.tpot_ms, first.speedup)
    for timing, base in zip(drafted.timings, plain.timings, strict=True):
        assert timing.baseline_tpot_ms == base.tpot_ms
        assert timing.speedup == pytest.approx(base.tpot_ms / timing.tpot_ms)
        assert timing.speedup_ci[0] <= timing.speedup <= timing.speedup_ci[1]
        assert timing.throughput_tok_s > 0
        assert timing.floor_ms is None  # a CPU has no bandwidth floor
    # the step at K = 1 is timed for the slope and has no row
    advice = report.adviser["advice"]
    assert [(a["batch"], len(a["predictions"])) for a in advice] == [(1, 3), (3, 3)]
    assert [row.k for row in report.rows] == [0, 3]


def test_timing_batches_are_full_and_copies_have_their_own_noise() -> None:
    prompts = requests(3, seed=1)
    assert [[r.id for r in batch] for batch in timing_batches(prompts, 2, 1)] == [["1-0"], ["1-1"]]
    (batch,) = timing_batches(prompts, 2, 5)
    assert len({r.id for r in batch}) == 5
    assert [r.prompt_ids for r in batch[3:]] == [r.prompt_ids for r in prompts[:2]]
    assert [len(batch) for batch in timing_batches(prompts, 7, 4)] == [4, 4]


def test_the_workload_and_warnings_are_announced(target: Target, head: Eagle3Head) -> None:
    monitor = RecordingMonitor()
    evaluate(target, head, monitor=monitor, temperatures=0, max_prompts=4)
    text = monitor.text
    assert "4 of 6 prompts of toy, up to 16 tokens each; T = 0; K = 3" in text
    assert "few prompts (4)" in text
    assert "few timed prompts (2)" in text


@pytest.mark.parametrize(
    ("speedup", "interval", "expected"),
    [
        (0.8, (0.7, 0.9), "slows decoding down here: 0.80× [0.70, 0.90] at batch 1"),
        (0.9, (0.8, 1.1), "do not show whether drafting pays here: 0.90× [0.80, 1.10] at batch 1"),
        (1.1, (0.8, 1.3), "do not show whether drafting pays here: 1.10× [0.80, 1.30] at batch 1"),
        (1.2, (1.1, 1.3), ""),
        (0.8, None, "slows decoding down here: 0.80× at batch 1"),
        (None, None, ""),
    ],
)
def test_row_warnings_follow_the_interval_of_the_speed_up(
    speedup: float | None, interval: tuple[float, float] | None, expected: str
) -> None:
    times = {"batch": 1, "prompts": 9, "tpot_ms": 1.0, "tpot_ms_ci": (1.0, 1.0), "ttft_ms": 1.0}
    timing = Timing(**times, step_ms=1.0, speedup=speedup, speedup_ci=interval)
    warnings = row_warnings(sample.row(timings=[timing]))
    assert len(warnings) == bool(expected)
    assert expected in "".join(warnings)


def test_the_reference_engine_counts_the_same(target: Target, head: Eagle3Head) -> None:
    paged, reference = (
        evaluate(target, head, engine=engine, timing_prompts=0) for engine in ("paged", "reference")
    )
    assert [r.counters for r in paged.rows] == [r.counters for r in reference.rows]
    assert {r.engine for r in paged.rows} == {"draftlab"}
    assert {r.engine for r in reference.rows} == {"draftlab-reference"}


def test_a_certificate_fills_the_sampled_rows(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = certify_module.Certificate(
        level="L3", test="G-test", statistic=99.0, p_value=1e-9, n=500, n_for_99_power=400,
        prompts_equal=1.0, passed=False, faults=["p = 1e-9"], arms=[], lines=["it differs"],
    )  # fmt: skip
    monkeypatch.setattr(certify_module, "certify", lambda *_, **__: certificate)
    monitor = RecordingMonitor()
    report = evaluate(target, head, monitor=monitor, timing_prompts=0, certify=True)
    assert "certificate of a head: it differs" in monitor.lines
    greedy, sampled = report.rows[1], report.rows[4]
    assert greedy.lossless.level == "L2"
    lossless = sampled.lossless
    assert (lossless.level, lossless.p_value, lossless.n) == ("L3", 1e-9, 500)
    assert "certificate failed: p = 1e-9" in sampled.warnings
    assert report.rows[3].lossless == lossless
    assert report.environment["certificates"]["a head"]["passed"] is False
