"""The adviser's predictions under load, for points with known times and acceptance."""

from __future__ import annotations

import pytest

from draftlab.evaluate.adviser import advise
from tests.helpers import sample_report as sample


def test_goodput_is_predicted_under_load() -> None:
    """The points' costs are additive, so that predictions are exact. At 64 no K beats K = 0."""
    report = sample.loaded_report()
    load = {(one["temperature"], one["concurrency"]): one for one in report.adviser["load"]}
    assert sorted(load) == [(t, c) for t in (0.0, 0.8) for c in (1, 4, 64)]
    for (_, concurrency), one in load.items():
        for p in one["predictions"]:
            point = sample.load_point(concurrency, p["k"])
            assert p["goodput_tok_s"] == pytest.approx(point.goodput_tok_s, rel=0.01)
            if p["k"] in (1, 3, 5):
                assert p["measured_speedup"] == point.speedup
            if p["k"] == 3:
                assert p["left_out_speedup"] == pytest.approx(point.speedup, rel=0.01)
                assert (p["met"], p["close"]) == (True, True)
    assert load[0.0, 1]["best_k"] > 2
    assert load[0.0, 64]["best_k"] == 0
    assert report.adviser["check"]["close"] == report.adviser["check"]["timed"] == 6
    assert "6 are within 5 %" in report.adviser["check"]["text"]


@pytest.mark.parametrize("prefill_ms", [0.1, 8.0, 60.0])
@pytest.mark.parametrize("ks", [(0, 1, 3, 5), (0, 1, 2, 4, 8)])
def test_prefills_in_steps_grow_with_the_tokens_of_a_step(
    prefill_ms: float, ks: tuple[int, ...]
) -> None:
    """Prefills take up to three fifths of an answer here, and are no linear function of K."""
    points = [sample.load_point(c, k, prefill_ms=prefill_ms) for c in (1, 4, 16) for k in ks]
    advice = advise([], load=points)
    assert advice["check"]["timed"] == 3 * (len(ks) - 3)
    assert advice["check"]["worst_error"] < 0.015


def test_a_concurrency_may_have_fewer_ks_than_others() -> None:
    """The prefills in steps of a larger K are then known from the other concurrencies' steps."""
    ks = {1: (0, 1, 2, 3, 5), 4: (0, 1, 2, 3), 16: (0, 1, 2, 3, 5)}
    points = [sample.load_point(c, k, prefill_ms=20) for c in ks for k in ks[c]]
    check = advise([], load=points)["check"]
    assert check["timed"] == 2 + 1 + 2
    assert check["worst_error"] < 0.05


def test_the_acceptance_of_a_left_out_k_plays_no_part() -> None:
    def left_out(**changes: object) -> list[float]:
        points = [
            sample.load_point(c, k, prefill_ms=60, **(changes if k == 3 else {}))
            for c in (1, 4, 16)
            for k in (0, 1, 3, 5)
        ]
        loads = advise([], load=points)["load"]
        return [p["left_out_speedup"] for one in loads for p in one["predictions"] if p["k"] == 3]

    expected = left_out()
    assert len(expected) == 3
    assert left_out(tokens_per_step=1.2, acceptance_at=[0.1, 0.05, 0.05]) == expected
