"""The adviser's arithmetic, on rows whose times and acceptance are known."""

from __future__ import annotations

from typing import Any

import pytest

from draftlab.evaluate.adviser import StepPoint, advise, step_ms
from draftlab.evaluate.results import Row, Timing
from draftlab.report import formatting as wording
from tests.helpers import sample_report as sample

PLAIN = 10.0


def timed(
    row: Row, step: float, batch: int = 1, plain: float = PLAIN, *, really: float = 1.0
) -> Row:
    """A row timed on prompts like its suite; steps take `really` times what is told."""
    tpot = really * step / row.acceptance_length
    timing = Timing(
        batch=batch,
        prompts=10,
        tpot_ms=tpot,
        tpot_ms_ci=(tpot, tpot),
        ttft_ms=1.0,
        step_ms=step,
        baseline_tpot_ms=plain,
        speedup=plain / tpot,
        speedup_ci=(0.9 * plain / tpot, 1.1 * plain / tpot),
    )
    return row.model_copy(update={"timings": [*row.timings, timing]})


def linear(k: int) -> float:
    return 10.5 + 1.5 * k


def only(rows: list[Row], *probes: StepPoint) -> dict[str, Any]:
    (advice,) = advise(rows, probes)["advice"]
    return advice


def test_the_line_between_two_ks() -> None:
    deep = timed(sample.row(k=6, keep=0.6), linear(6))
    shallow = timed(sample.row(k=2, keep=0.6), linear(2))
    advice = only([sample.baseline(), deep, shallow])
    unconditional = deep.counters.acceptance_at
    expected = {
        k: PLAIN * (1 + sum(unconditional[:k])) / linear(k) for k in range(1, 7)
    }  # by the formula, from the raw counters
    found = {p["k"]: p["speedup"] for p in advice["predictions"]}
    assert found == pytest.approx(expected)
    assert advice["best_k"] == max(expected, key=expected.get)
    at_six = advice["predictions"][5]
    assert at_six["error"] == pytest.approx(0, abs=1e-9)
    assert at_six["measured_speedup"] == pytest.approx(deep.timings[0].speedup)
    assert [p["measured_speedup"] is not None for p in advice["predictions"]] == [
        False, True, False, False, False, True,
    ]  # fmt: skip


def test_one_k_needs_a_probe_for_the_slope() -> None:
    row = timed(sample.row(k=4, keep=0.6, head="h"), linear(4))
    assert advise([row]) is None
    points = [StepPoint(row.engine, "h", 1, k, linear(k) + 3) for k in (1, 4)]  # a slower moment
    others = [StepPoint(row.engine, "other", 1, 1, 99.0), StepPoint(row.engine, "h", 8, 1, 99.0)]
    advice = only([row], *points, *others)
    assert [p["step_ms"] for p in advice["predictions"]] == pytest.approx(
        [linear(k) for k in (1, 2, 3, 4)]
    )


def test_a_step_is_never_cheaper_than_plain_decoding() -> None:
    row = timed(sample.row(k=5, keep=0.6, head="h"), 11.0)
    advice = only([row], *(StepPoint(row.engine, "h", 1, k, 4.0 * k) for k in (1, 5)))
    assert min(p["step_ms"] for p in advice["predictions"]) == PLAIN


def test_beyond_the_measured_the_slope_is_kept() -> None:
    steps = {2: 10.0, 4: 14.0, 6: 15.0}
    assert [step_ms(k, steps, {}) for k in (1, 3, 5, 8)] == pytest.approx([8.0, 12.0, 14.5, 16.0])


def test_settings_and_batches_are_advised_apart() -> None:
    def both(row: Row) -> Row:
        return timed(timed(row, linear(row.k)), 4 * linear(row.k), batch=32, plain=12.0)

    rows = [
        both(sample.row(k=k, temperature=t, draft_probs=probs, keep=0.5))
        for t, probs in ((0.0, False), (0.8, False), (0.8, True))
        for k in (1, 4)
    ]
    found = advise(rows)["advice"]
    assert len(found) == 6
    slow = [one for one in found if one["batch"] == 32]
    assert all("drafting does not pay here" in one["text"] for one in slow)
    assert all("pay" not in one["text"] for one in found if one["batch"] == 1)


def test_the_line_names_the_nearest_measurement() -> None:
    rows = [timed(sample.row(k=k, keep=0.6), 10.0 + k) for k in (1, 8)]
    advice = only(rows)
    best = advice["predictions"][advice["best_k"] - 1]
    assert best["measured_speedup"] is None
    assert advice["text"].startswith(
        f"best K = {best['k']} at batch 1: predicted {best['speedup']:.2f}×; measured at K = 1: "
    )


def test_it_says_how_well_it_met_the_measurement() -> None:
    right = [timed(sample.row(k=k, keep=0.6), linear(k)) for k in (2, 5)]
    found = advise(right)
    assert found["check"] == {
        "timed": 2,
        "met": 2,
        "mean_error": pytest.approx(0, abs=0.01),
        "worst_error": pytest.approx(0, abs=0.01),
    }
    assert "NOT MET" not in found["advice"][0]["text"]
    # step costs that are wrong by 30 %: the measured speed-up refutes them
    wrong = [timed(sample.row(k=k, keep=0.6), linear(k), really=1 / 1.3) for k in (2, 5)]
    found = advise([sample.baseline(), *wrong])
    assert (found["check"]["timed"], found["check"]["met"]) == (2, 0)
    assert found["check"]["worst_error"] == pytest.approx(1 - 1 / 1.3, abs=0.01)
    assert "NOT MET: -23 % off at K = " in found["advice"][0]["text"]
    report = sample.report([sample.baseline(), *wrong]).model_copy(update={"adviser": found})
    assert "0 of 2 predictions met the measured speed-up" in wording.advice_check(report)
    assert "off by 23 % on average, 23 % at most" in wording.advice_check(report)
    assert wording.advice_check(sample.report()) == ""


def test_untimed_rows_get_no_advice() -> None:
    assert advise([sample.baseline(), sample.row()]) is None
