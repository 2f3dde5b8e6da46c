"""The adviser's predictions for rows with known times and acceptance."""

from __future__ import annotations

from typing import Any

import pytest

from draftlab.evaluate.adviser import StepTime, advise, step_ms
from draftlab.evaluate.results import Row
from draftlab.report import formatting as fmt
from tests.helpers import sample_report as sample
from tests.helpers.sample_report import PLAIN_MS, with_timing


def linear(k: int) -> float:
    return 10.5 + 1.5 * k


def only_advice(rows: list[Row], *step_times: StepTime) -> dict[str, Any]:
    (advice,) = advise(rows, step_times)["advice"]
    return advice


def test_steps_between_two_ks_are_interpolated() -> None:
    large = with_timing(sample.row(k=6, keep=0.6), linear(6))
    small = with_timing(sample.row(k=2, keep=0.6), linear(2))
    advice = only_advice([sample.baseline(), large, small])
    unconditional = large.counters.acceptance_at
    expected = {
        k: PLAIN_MS * (1 + sum(unconditional[:k])) / linear(k) for k in range(1, 7)
    }  # the formula, from the raw counters
    predicted = {p["k"]: p["speedup"] for p in advice["predictions"]}
    assert predicted == pytest.approx(expected)
    assert advice["best_k"] == max(expected, key=expected.get)
    at_six = advice["predictions"][5]
    assert at_six["error"] == pytest.approx(0, abs=1e-9)
    assert at_six["measured_speedup"] == pytest.approx(large.timings[0].speedup)
    measured = [p["k"] for p in advice["predictions"] if p["measured_speedup"] is not None]
    assert measured == [2, 6]


def test_one_k_needs_further_step_times_for_the_slope() -> None:
    row = with_timing(sample.row(k=4, keep=0.6, head="h"), linear(4))
    assert advise([row]) is None
    engine = row.engine
    slower = [StepTime(engine, "h", 1, k, linear(k) + 3) for k in (1, 4)]
    others = [StepTime(engine, "other", 1, 1, 99.0), StepTime(engine, "h", 8, 1, 99.0)]
    advice = only_advice([row], *slower, *others)
    steps = [p["step_ms"] for p in advice["predictions"]]
    assert steps == pytest.approx([linear(k) for k in (1, 2, 3, 4)])


def test_a_step_is_never_cheaper_than_plain_decoding() -> None:
    row = with_timing(sample.row(k=5, keep=0.6, head="h"), 11.0)
    advice = only_advice([row], *(StepTime(row.engine, "h", 1, k, 4.0 * k) for k in (1, 5)))
    assert min(p["step_ms"] for p in advice["predictions"]) == PLAIN_MS


def test_the_slope_is_kept_beyond_the_measured_ks() -> None:
    steps = {2: 10.0, 4: 14.0, 6: 15.0}
    assert [step_ms(k, steps, {}) for k in (1, 3, 5, 8)] == pytest.approx([8.0, 12.0, 14.5, 16.0])


def test_every_setting_and_batch_has_its_own_advice() -> None:
    rows = [
        sample.row(k=k, temperature=t, draft_probs=probs, keep=0.5)
        for t, probs in ((0.0, False), (0.8, False), (0.8, True))
        for k in (1, 4)
    ]
    rows = [with_timing(row, linear(row.k)) for row in rows]
    rows = [with_timing(row, 4 * linear(row.k), batch=32, plain_ms=12.0) for row in rows]
    advice = advise(rows)["advice"]
    assert len(advice) == 6
    for one in advice:
        assert ("drafting does not pay here" in one["text"]) == (one["batch"] == 32)


def test_the_text_names_the_nearest_measurement() -> None:
    rows = [with_timing(sample.row(k=k, keep=0.6), 10.0 + k) for k in (1, 8)]
    advice = only_advice(rows)
    best = advice["predictions"][advice["best_k"] - 1]
    assert best["measured_speedup"] is None
    assert advice["text"].startswith(
        f"best K = {best['k']} at batch 1: predicted {best['speedup']:.2f}×; measured at K = 1: "
    )


def test_predictions_are_checked_against_measurements() -> None:
    spread = (0.9, 1.1)
    correct = [with_timing(sample.row(k=k, keep=0.6), linear(k), spread=spread) for k in (2, 5)]
    adviser = advise(correct)
    zero = pytest.approx(0, abs=0.01)
    assert adviser["check"] == {"timed": 2, "met": 2, "mean_error": zero, "worst_error": zero}
    assert "WRONG" not in adviser["advice"][0]["text"]
    # step times that are 30 % too long: the measured speed-up refutes them
    wrong = [
        with_timing(sample.row(k=k, keep=0.6), linear(k), spread=spread, tpot_factor=1 / 1.3)
        for k in (2, 5)
    ]
    report = sample.with_adviser([sample.baseline(), *wrong])
    check = report.adviser["check"]
    assert (check["timed"], check["met"]) == (2, 0)
    assert check["worst_error"] == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert "is WRONG by -23 %" in report.adviser["advice"][0]["text"]
    text = fmt.advice_check(report)
    assert text.startswith("0 of 2 predictions")
    assert "23 % on average and 23 % at most" in text
    assert fmt.advice_check(sample.report()) == ""


def test_untimed_rows_get_no_advice() -> None:
    assert advise([sample.baseline(), sample.row()]) is None
