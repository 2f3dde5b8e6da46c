"""The self-check passes a correct engine, even with rare events, and detects a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.self_check import (
    LEVEL,
    failure_message,
    self_check,
)

K = 3
DrawProbability = Callable[[np.random.Generator], float]


def medium(generator: np.random.Generator) -> float:
    return generator.beta(2, 2)


def near_certain(generator: np.random.Generator) -> float:
    """Draw a probability near 0 or 1, as those of a confident target."""
    return generator.beta(0.1, 0.1)


def rare(generator: np.random.Generator) -> float:
    return generator.beta(1, 40)


def simulate(
    draw: DrawProbability,
    seed: int,
    *,
    prompts: int = 40,
    steps: int = 40,
    excess: float = 0.0,
) -> list[Generation]:
    """Return steps whose drafts are accepted as often as expected, or `excess` more often."""
    generator = np.random.default_rng(seed)
    generations = []
    for i in range(prompts):
        counters, expected, step_counts = Counters(K), [0.0] * K, []
        for _ in range(steps):
            accepted = 0
            for position in range(K):
                probability = draw(generator)
                expected[position] += probability
                if generator.random() >= probability * (1 + excess):
                    break
                accepted += 1
            counters.add_step(K, accepted)
            step_counts.append((K, accepted))
        generations.append(
            Generation(
                str(i), (0,), "length", counters, tuple(expected), tuple(step_counts), 0.0, 1.0
            )
        )
    return generations


@pytest.mark.parametrize("draw", [medium, near_certain, rare])
def test_a_correct_engine_fails_no_more_often_than_the_level(draw: DrawProbability) -> None:
    checks = [self_check(simulate(draw, s, prompts=12, steps=25), K) for s in range(300)]
    assert sum(not check.passed for check in checks) <= 2  # P(> 2) = 0.004 at the level
    assert LEVEL <= 1e-3


def test_a_sampler_that_accepts_too_often_is_detected() -> None:
    checks = [self_check(simulate(medium, s, prompts=64, excess=0.1), K) for s in range(10)]
    assert not any(check.passed for check in checks)
    assert "above their expectation" in failure_message(checks[0])


def test_wrong_expectations_are_detected() -> None:
    correct = simulate(medium, 1, prompts=64)
    assert self_check(correct, K).passed
    assert failure_message(self_check(correct, K)) is None
    # too high at one position, too low at another: the sums still agree
    shift = np.array([0.12, -0.12, 0.0])
    wrong = [
        dataclasses.replace(g, expected=tuple(np.array(g.expected) + shift * len(g.steps)))
        for g in correct
    ]
    assert sum(map(sum, (g.expected for g in wrong))) == pytest.approx(
        sum(map(sum, (g.expected for g in correct)))
    )
    check = self_check(wrong, K)
    assert not check.passed
    assert "self-check failed" in failure_message(check)


def test_greedy_counts_must_be_equal() -> None:
    def zero_or_one(generator: np.random.Generator) -> float:
        return float(generator.random() < 0.6)

    correct = simulate(zero_or_one, 2)
    assert self_check(correct, K, greedy=True).passed
    first = correct[0]
    one_off = (first.expected[0] - 1, *first.expected[1:])
    wrong = [dataclasses.replace(first, expected=one_off), *correct[1:]]
    assert self_check(wrong, K).passed  # the statistical test does not detect one draft
    check = self_check(wrong, K, greedy=True)
    assert not check.passed
    assert "bookkeeping is faulty" in failure_message(check)


def test_all_rows_of_a_report_share_the_level() -> None:
    """A score that one row in 3,000 reaches is a fault of a report of one row, not of 64."""
    (row,) = [
        rows
        for rows in (simulate(medium, seed, excess=0.05) for seed in range(40))
        if LEVEL / 64 < self_check(rows, K).p_value < LEVEL
    ][:1]
    assert not self_check(row, K).passed
    check = self_check(row, K, rows=64)
    assert (check.passed, check.level) == (True, LEVEL / 64)
    faulty = simulate(medium, 0, prompts=64, excess=0.2)
    assert not self_check(faulty, K, rows=64).passed


def test_no_drafts_and_no_expectations_give_no_check() -> None:
    generations = simulate(medium, 3, prompts=2)
    assert self_check(generations, 0) is None
    assert self_check(simulate(medium, 3, prompts=2, steps=0), K) is None
    unknown = [dataclasses.replace(g, expected=()) for g in generations]  # as vLLM's generations
    assert self_check(unknown, K) is None


def test_rare_events_that_did_not_happen_pass() -> None:
    """None of 64 drafts with probability 0.05 is accepted: 4 % of correct engines do that."""
    counters = Counters(1)
    counters.add_step(1, 0)
    one = Generation("p", (0, 0), "length", counters, (0.05,), ((1, 0),), 0.0, 1.0)
    check = self_check([one] * 64, 1)
    assert check.z[0] == pytest.approx(-0.05 * 64 / (64 * 0.05 * 0.95) ** 0.5)
    assert check.passed
