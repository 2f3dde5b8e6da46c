"""The adviser's predictions for rows with known times and acceptance."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftlab.evaluate.adviser import (
    Probe,
    SpeedupTable,
    advise,
)
from draftlab.evaluate.results import Row, Timing
from draftlab.evaluate.warnings import row_warnings
from tests.helpers import sample_report as sample
from tests.helpers.sample_report import PLAIN_MS, with_timing


def linear(k: int) -> float:
    return 10.5 + 1.5 * k


def timed(k: int, step: float, **changes: Any) -> Row:
    return with_timing(sample.row(k=k, keep=0.6), step, **changes)


def only_advice(rows: list[Row], *probes: Probe) -> dict[str, Any]:
    (advice,) = advise(rows, probes)["advice"]
    return advice


def test_a_counted_k_uses_its_own_tokens_a_step() -> None:
    """Neither the first drafts of the largest K nor the timed prompts' acceptance replace them."""
    large, small = timed(6, linear(6)), sample.row(k=2, keep=0.4)
    easier = sample.row(k=2, keep=0.9)  # on the timed prompts K = 2 accepts more
    small = with_timing(
        small, linear(2), tokens_per_step=easier.tokens_per_step,
        acceptance_at=easier.counters.acceptance_at,
    )  # fmt: skip
    advice = only_advice([sample.baseline(), large, small])
    at = {p["k"]: p for p in advice["predictions"]}
    for row in (large, small):
        tokens = (row.output_tokens - row.prompts) / row.drafts
        assert at[row.k]["acceptance_length"] == pytest.approx(row.acceptance_length)
        assert at[row.k]["tokens_per_step"] == pytest.approx(tokens)
        assert tokens < row.acceptance_length  # the length limit truncates some
        assert at[row.k]["speedup"] == pytest.approx(PLAIN_MS * tokens / linear(row.k))
        assert at[row.k]["speedup_ci"] == row.timings[0].speedup_ci
    widths = [math.log(ci[1] / ci[0]) / 2 for ci in (
        large.acceptance_length_ci, large.timings[0].step_ratio_ci
    )]  # fmt: skip
    low, high = at[4]["speedup_ci"]  # of a K that was not measured: the wider parts together
    assert math.log(high / low) / 2 >= math.hypot(*widths) - 1e-9
    assert math.log(high / low) / 2 < sum(widths) * 1.5
    assert [p["k"] for p in advice["predictions"] if p["timed_speedup"]] == [2, 6]
    assert [k for k in at if at[k]["measured"]] == [2, 6]
    assert at[4]["speedup"] > at[6]["speedup"] > at[2]["speedup"]
    assert low < at[6]["speedup_ci"][1]  # so K = 4 is not clearly faster than K = 6, the measured
    assert advice["best_k"] == 6
    number = f"{at[4]['speedup']:.2f}× [{low:.2f}, {high:.2f}]"
    assert f", measured; K = 4 is predicted not to be clearly faster: {number}" in advice["text"]


def test_one_k_needs_a_probe_for_the_slope() -> None:
    row = timed(4, linear(4))
    assert advise([row]) is None
    own = (row.suite, row.engine, row.head)
    other_head = Probe(row.suite, row.engine, "other", 0.0, False, 1, row.timings[0])
    probe = Probe(*own, 0.0, False, 1, timed(1, linear(1)).timings[0])
    advice = only_advice([row], probe, other_head)
    assert [p["step_ms"] for p in advice["predictions"]] == pytest.approx(
        [linear(k) for k in (1, 2, 3, 4)]
    )
    # the slope also serves other temperatures of the head, whose steps are slower
    warm = with_timing(sample.row(k=4, keep=0.6, temperature=0.8), linear(4) + 3)
    _, warm = advise([row, warm], [probe])["advice"]
    assert [p["step_ms"] for p in warm["predictions"]] == pytest.approx(
        [linear(k) + 3 for k in (1, 2, 3, 4)]
    )


def test_steps_of_another_head_play_no_part() -> None:
    """Neither under the same conditions nor where that head was measured at more K's."""
    own = [timed(k, linear(k)) for k in (1, 4)]
    warm = [with_timing(sample.row(k=k, keep=0.6, temperature=0.8), linear(k)) for k in (1, 4)]
    other = [
        timed(k, 3 * linear(k) + k * k).model_copy(update={"head": "other"}) for k in (1, 2, 3, 4)
    ]
    for one in advise([*own, *warm, *other])["advice"]:
        if one["head"] != "other":
            steps = [p["step_ms"] for p in one["predictions"]]
            assert steps == pytest.approx([linear(k) for k in (1, 2, 3, 4)])


@pytest.mark.parametrize(("above", "best"), [(1.4, 5), (1.02, 4)])
def test_a_clearly_faster_k_is_above_the_interval_of_the_measured_one(
    above: float, best: int
) -> None:
    """Not only above its speed-up."""
    rows = [
        with_timing(
            sample.row(k=k, keep=0.6, acceptance_length_ci=(2.0, 2.001)), 10.0 + 0.1 * k,
            speedup=slower * s, speedup_ci=(0.95 * slower * s, above * slower * s),
            step_ratio_ci=(1.0, 1.001),
        )
        for k, slower, s in ((2, 1.0, 1.5), (5, 0.85, 2.0))
    ]  # fmt: skip
    advice = only_advice(rows)
    at = {p["k"]: p for p in advice["predictions"]}
    assert at[5]["speedup"] < at[4]["speedup_ci"][0] < 1.4 * at[5]["speedup"]
    assert advice["best_k"] == best


def test_a_step_is_never_cheaper_than_plain_decoding() -> None:
    advice = only_advice([timed(5, 11.0), timed(1, 9.8)])  # within its interval
    assert min(p["step_ms"] for p in advice["predictions"]) == PLAIN_MS


def timing(step_ms: float, k: int = 0, **changes: Any) -> Timing:
    fields = {"batch": 1, "prompts": 8, "tpot_ms": 1.0, "tpot_ms_ci": None, "ttft_ms": 1.0}
    accepted = {"acceptance_at": [0.5] * k, "tokens_per_step": 1 + 0.5 * k}
    more = {"step_ms": step_ms, "baseline_tpot_ms": 5.0}
    return Timing.model_validate(fields | accepted | more | changes)


def table(steps: dict[int, float], *, flat: bool = False) -> SpeedupTable:
    """Return a table of measured steps, by K."""
    return SpeedupTable(flat, {k: timing(ms, k) for k, ms in steps.items()}, steps)


def test_a_step_lies_on_the_line_between_measured_ones() -> None:
    bent = table({2: 10.0, 4: 14.0, 6: 15.0})
    assert [bent.step_ms(k) for k in (2, 4, 6)] == [10.0, 14.0, 15.0]
    assert [bent.step_ms(k) for k in (1, 3, 5, 8)] == [8.0, 12.0, 14.5, 16.0]
    linear_steps = table({k: linear(k) for k in (2, 4)})
    assert [linear_steps.step_ms(k) for k in (1, 3, 7)] == pytest.approx(
        [linear(k) for k in (1, 3, 7)]
    )
    assert table({2: 10.0}).step_ms(3) is None
    assert table({2: 10.0}, flat=True).step_ms(3) == 10.0


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


def test_the_advice_claims_no_more_than_the_warning() -> None:
    rows = [with_timing(sample.row(k=k, keep=0.2), 1.2 * PLAIN_MS + 0.1 * k) for k in (1, 4)]
    (advice,) = advise(rows)["advice"]
    low, high = advice["predictions"][advice["best_k"] - 1]["speedup_ci"]
    assert low < 1 < high
    assert "; it is not shown whether drafting pays here" in advice["text"]
    assert any("do not show whether drafting pays" in text for text in row_warnings(rows[0]))


def test_each_timed_k_is_predicted_from_the_others() -> None:
    rows = [timed(k, linear(k), spread=(0.9, 1.1)) for k in (1, 3, 5)]
    adviser = advise([sample.baseline(), *rows])
    at = {p["k"]: p for p in adviser["advice"][0]["predictions"]}
    assert [k for k, p in at.items() if p["left_out_speedup"]] == [3]
    one, _, five = rows
    first, *rest = five.counters.acceptance_at
    length = 1 + (one.counters.acceptance_at[0] + first) / 2 + sum(rest[:2])
    shares = [row.tokens_per_step / row.acceptance_length for row in (one, five)]
    expected = PLAIN_MS * length * sum(shares) / 2 / linear(3)
    assert at[3]["left_out_speedup"] == pytest.approx(expected)
    assert at[3]["error"] == pytest.approx(expected / at[3]["timed_speedup"] - 1)
    check = adviser["check"]
    assert (check["timed"], check["met"]) == (1, 1)
    assert check["worst_error"] == pytest.approx(abs(at[3]["error"]))
    assert check["worst_error"] < 0.05
    assert "is off by" not in adviser["advice"][0]["text"]


def test_a_wrong_step_line_is_not_met() -> None:
    """A step of K = 3 that takes 30 % longer than the line through the others."""
    steps = {1: linear(1), 3: 1.3 * linear(3), 5: linear(5)}
    rows = [timed(k, step, spread=(0.9, 1.1)) for k, step in steps.items()]
    report = sample.with_adviser([sample.baseline(), *rows])
    at = {p["k"]: p for p in report.adviser["advice"][0]["predictions"]}
    assert at[3]["met"] is False
    assert at[3]["error"] == pytest.approx(0.3, abs=0.03)
    assert report.adviser["check"]["met"] == 0
    assert "from the other timed K's is off by" in report.adviser["advice"][0]["text"]
    text = report.adviser["check"]["text"]
    assert text.startswith("0 of 1 speed-ups at a timed K, predicted from the other timed K's")


def test_two_timed_ks_cannot_be_checked_and_untimed_rows_get_no_advice() -> None:
    assert advise([sample.baseline(), sample.row()]) is None
    adviser = advise([timed(k, linear(k)) for k in (2, 5)])
    assert (adviser["check"]["timed"], adviser["check"]["worst_error"]) == (0, None)
    assert "no prediction was checked" in adviser["check"]["text"]
