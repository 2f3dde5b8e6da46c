"""The cost model of steps: exact on additive costs, and cliffs found without false alarms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from draftlab.evaluate.cost_model import Steps, find_cliffs, fit_cost_model
from draftlab.evaluate.warnings import (
    summarize_cliffs,
    with_cliff_warnings,
    with_load_cliff_warnings,
)
from tests.helpers import sample_report as sample
from tests.helpers.sample_report import with_timing

BATCHES, KS = (1, 2, 4, 8, 16, 32), range(9)
Cost = Callable[[int, int], float]


def additive(batch: int, k: int) -> float:
    return 4.0 + 0.012 * batch * (k + 1) + 0.25 * k + 0.004 * k * batch + (0.3 if k else 0)


def bandwidth_then_arithmetic(batch: int, k: int) -> float:
    return max(4.2, 0.03 * batch * (k + 1)) + 0.25 * k * (1 + 0.02 * batch)


def parallel_head(batch: int, k: int) -> float:
    return 5.0 + 0.01 * batch * (k + 1) + (0.8 if k else 0)


def tiles(batch: int, k: int) -> float:
    rows = batch * (k + 1)
    return 0.25 + 0.002 * rows + 0.12 * sum(rows > r for r in (8, 16, 32)) + 0.04 * k


COSTS = (additive, bandwidth_then_arithmetic, parallel_head, tiles)


def noisy(cost: Cost, seed: int, sigma: float = 0.03) -> dict[tuple[int, int], float]:
    generator = np.random.default_rng(seed)
    noise = {(b, k): float(np.exp(generator.normal(0, sigma))) for b in BATCHES for k in KS}
    return {(b, k): factor * cost(b, k) for (b, k), factor in noise.items()}


def test_additive_costs_are_fitted_exactly() -> None:
    costs = fit_cost_model({(b, k): additive(b, k) for b in (1, 4, 32) for k in (0, 1, 3, 5)})
    for batch, k in ((2, 2), (16, 4), (32, 0), (8, 1)):
        assert costs.ms(batch, k) == pytest.approx(additive(batch, k), rel=0.01)


def test_more_rows_or_drafts_never_cost_less() -> None:
    generator = np.random.default_rng(3)
    costs = fit_cost_model({(b, k): float(generator.uniform(1, 9)) for b in BATCHES for k in KS})
    drafted = [[costs.ms(b, k) for k in KS if k] for b in BATCHES]
    for axis in (0, 1):
        assert (np.diff(drafted, axis=axis) >= -1e-9).all()


@pytest.mark.parametrize("cost", COSTS)
def test_noisy_steps_without_a_cliff_raise_no_alarm(cost: Cost) -> None:
    for seed in range(20):
        assert find_cliffs(noisy(cost, seed)) == []
        few = {
            s: ms for s, ms in noisy(cost, seed).items() if s[0] in (1, 8) and s[1] in (0, 1, 3, 5)
        }
        assert find_cliffs(few) == []


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("shape", [(8, 3), (16, 8), (1, 1), (4, 0)])
def test_a_planted_cliff_is_found_alone(cost: Cost, shape: tuple[int, int]) -> None:
    for seed in range(5):
        steps = noisy(cost, seed)
        steps[shape] *= 1.5
        (cliff,) = find_cliffs(steps)
        assert (cliff.batch, cliff.k, cliff.step_ms) == (*shape, steps[shape])
        assert cliff.expected_ms == pytest.approx(cost(*shape), rel=0.15)
        rows = shape[0] * (shape[1] + 1)
        what = f"K = {shape[1]}" if shape[1] else "no drafts"
        assert f"a step with {what} at batch {shape[0]} ({rows} rows) takes" in cliff.text


def test_several_cliffs_do_not_hide_each_other() -> None:
    steps = noisy(additive, 1)
    planted = [(2, 4), (8, 3), (16, 1)]
    for shape in planted:
        steps[shape] *= 2
    assert sorted((c.batch, c.k) for c in find_cliffs(steps)) == planted


def test_plain_decoding_at_few_batches_is_not_judged_by_steps_with_drafts() -> None:
    for batches in ((1,), (1, 2)):
        steps = {(b, k): additive(b, k) * (3 if k == 0 else 1) for b in batches for k in range(6)}
        assert find_cliffs(steps) == []


def test_any_steps_can_be_judged() -> None:
    """Random times in random shapes: nothing divides by zero or fails to converge."""
    generator = np.random.default_rng(0)
    for _ in range(100):
        batches = generator.choice(BATCHES, generator.integers(1, 6), replace=False)
        ks = generator.choice(KS, generator.integers(1, 8), replace=False)
        steps = {(int(b), int(k)): float(generator.lognormal(1, 1)) for b in batches for k in ks}
        for cliff in find_cliffs(steps):
            assert cliff.step_ms > cliff.expected_ms > 0


def test_a_step_beyond_the_others_may_bend() -> None:
    """The largest step is compared with an extrapolation, so only a large excess is an alarm."""
    steps = noisy(additive, 2)
    steps[32, 8] *= 1.35
    assert find_cliffs(steps) == []
    steps[32, 8] *= 1.5
    (cliff,) = find_cliffs(steps)
    assert (cliff.batch, cliff.k) == (32, 8)


def test_small_steps_may_all_take_as_long() -> None:
    """Below eight rows nothing gets faster; a line through the larger steps would go below that."""
    steps = {(b, k): max(0.21, 0.06 * b * (k + 1)) + 0.03 * k for b in BATCHES for k in KS}
    assert find_cliffs(steps) == []
    steps[4, 2] *= 1.5
    assert [(c.batch, c.k) for c in find_cliffs(steps)] == [(4, 2)]


def test_the_smallest_step_is_judged_by_larger_batches_alone() -> None:
    steps = {(b, k): additive(b, k) for b in BATCHES for k in KS}
    steps[1, 0] *= 1.5
    (cliff,) = find_cliffs(steps)
    assert (cliff.batch, cliff.k, cliff.larger) == (1, 0, 2)


def test_a_larger_batch_that_is_faster_is_told() -> None:
    steps: Steps = {(1, 3): 5.0, (2, 3): 6.6, (4, 3): 5.2}
    (cliff,) = find_cliffs(steps)
    assert (cliff.batch, cliff.larger) == (2, 4)
    assert cliff.text.endswith("takes 6.60 ms, longer than one at batch 4 (5.20 ms)")
    assert find_cliffs({(1, 3): 5.0, (2, 3): 5.4, (4, 3): 5.2}) == []
    assert find_cliffs({}) == []


def test_rows_are_warned_of_their_own_cliffs() -> None:
    rows = [sample.baseline(), *(sample.row(k=k, keep=0.6) for k in (1, 3, 5))]
    for batch in (1, 8):
        rows = [
            with_timing(r, additive(batch, r.k) * (1.6 if (batch, r.k) == (8, 3) else 1), batch)
            for r in rows
        ]
    warned = [row.warnings for row in with_cliff_warnings(rows)]
    assert [len(texts) for texts in warned] == [0, 0, 1, 0]
    assert warned[2][0].startswith("a step with K = 3 at batch 8 (32 rows) takes")
    assert with_load_cliff_warnings([]) == []


def warned(slow: dict[tuple[int, int], float]) -> list[list[str]]:
    """Return the warnings of plain decoding and of two heads with K = 1, 3, 5 at five batches."""
    heads = [sample.row(k=k, keep=0.6, head=name) for name in ("a", "b") for k in (1, 3, 5)]
    rows = [sample.baseline(), *heads]
    for batch in (1, 2, 4, 8, 16):
        rows = [
            with_timing(r, additive(batch, r.k) * slow.get((batch, r.k), 1), batch) for r in rows
        ]
    return [row.warnings for row in with_cliff_warnings(rows)]


def test_plain_decoding_is_warned_of_once_beside_several_heads() -> None:
    assert [len(texts) for texts in warned({(8, 0): 1.6})] == [1] + [0] * 6


def test_cliffs_of_a_batch_are_one_warning() -> None:
    """The first three batches are named, plain decoding apart; the other steps are counted."""
    planted = {(8, 0): 1.6, (1, 1): 2.0, (1, 5): 3.0, (8, 3): 2.2, (4, 5): 2.5, (2, 3): 1.9}
    steps = {
        (b, k): additive(b, k) * planted.get((b, k), 1)
        for b in (1, 2, 4, 8, 16)
        for k in (0, 1, 3, 5)
    }
    cliffs, named = find_cliffs(steps), summarize_cliffs(find_cliffs(steps))
    assert sorted((c.batch, c.k) for c in cliffs) == sorted(planted)
    assert [(c.batch, c.k) for c, _ in named] == [(1, 5), (4, 5), (8, 3)]
    assert named[0][1] == f"{cliffs[0].text}; the same holds for K = 1"
    assert named[1][1] == named[1][0].text
    assert named[2][1] == f"{named[2][0].text}; 2 more such steps, as if the machine was busy"
    plain, *drafted = warned(planted)
    assert plain == []
    assert [len(texts) for texts in drafted] == [0, 1, 2] * 2
    assert summarize_cliffs([]) == []


def test_prefills_under_load_are_part_of_the_judged_steps() -> None:
    """L · TTFT may exceed the time of an answer, where admissions overlap with steps."""

    def step_ms(c: int, k: int) -> float:
        tokens = sum(0.7**i for i in range(k + 1))  # of `load_point`
        slow = 1.6 if (c, k) == (8, 3) else 1
        return slow * (additive(c, k) + 0.15 * (c - 1) * tokens)

    points = [
        sample.load_point(c, k, step_ms=step_ms(c, k))
        for c in (1, 4, 8, 16, 64)
        for k in (0, 1, 3, 5)
    ]
    slow = points[0].ttft_ms.model_copy(update={"mean": 1e4})
    points = [p.model_copy(update={"ttft_ms": slow}) for p in points]
    warned = {(p.concurrency, p.k): p.warnings for p in with_load_cliff_warnings(points)}
    assert [shape for shape, texts in warned.items() if texts] == [(8, 3)]


def test_points_without_steps_are_not_judged() -> None:
    points = [sample.load_point(c, k) for c in (1, 4, 16) for k in (0, 1, 3, 5)]
    none = sample.load_point(4, 7, step_ms=None)
    judged = with_load_cliff_warnings([*points, none])
    assert [p.warnings for p in judged] == [p.warnings for p in [*points, none]]
