"""The self-check passes a right engine, rare events included, and catches a wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.self_check import LEVEL, complaint, judged_at, self_check

K = 3
Chances = Callable[[np.random.Generator], float]


def middling(generator: np.random.Generator) -> float:
    return generator.beta(2, 2)


def certain(generator: np.random.Generator) -> float:
    """Near 0 or 1, as a sharp target's are."""
    return generator.beta(0.1, 0.1)


def rare(generator: np.random.Generator) -> float:
    return generator.beta(1, 40)


def simulate(
    chances: Chances, seed: int, *, prompts: int = 40, steps: int = 40, excess: float = 0.0
) -> list[Generation]:
    """Steps whose drafts are accepted with the chance told, or a little more often."""
    generator = np.random.default_rng(seed)
    found = []
    for i in range(prompts):
        counters, expected, taken = Counters(K), [0.0] * K, []
        for _ in range(steps):
            accepted = 0
            for position in range(K):
                chance = chances(generator)
                expected[position] += chance
                if generator.random() >= chance * (1 + excess):
                    break
                accepted += 1
            counters.add_step(K, accepted)
            taken.append((K, accepted))
        found.append(
            Generation(str(i), (0,), "length", counters, tuple(expected), tuple(taken), 0.0, 1.0)
        )
    return found


def test_judged_drafts_are_those_that_were_reached() -> None:
    (generation,) = simulate(middling, 0, prompts=1, steps=0)
    steps = ((3, 0), (3, 3), (2, 2), (1, 1), (0, 0))
    assert judged_at(dataclasses.replace(generation, steps=steps), K) == [4, 2, 1]


@pytest.mark.parametrize("chances", [middling, certain, rare])
def test_a_right_engine_fails_no_more_often_than_the_level(chances: Chances) -> None:
    checks = [self_check(simulate(chances, s, prompts=12, steps=25), K) for s in range(300)]
    assert sum(not check.passed for check in checks) <= 2  # P(> 2) = 0.004 at the level
    assert LEVEL <= 1e-3


@pytest.mark.parametrize("chances", [middling, certain])
def test_scores_are_no_wider_than_standard_normal(chances: Chances) -> None:
    z = [self_check(simulate(chances, seed), K).z[0] for seed in range(200)]
    assert abs(np.mean(z)) < 0.25
    assert np.std(z) < 1.15


def test_a_sampler_that_accepts_too_often_is_caught() -> None:
    caught = [self_check(simulate(middling, s, prompts=64, excess=0.1), K) for s in range(10)]
    assert not any(check.passed for check in caught)
    assert "above their expectation" in complaint(caught[0])


def test_a_falsified_expectation_is_caught() -> None:
    true = simulate(middling, 1, prompts=64)
    assert self_check(true, K).passed
    assert complaint(self_check(true, K)) is None
    # too much at one position, too little at another: the sums still agree
    shift = np.array([0.12, -0.12, 0.0])
    false = [
        dataclasses.replace(g, expected=tuple(np.array(g.expected) + shift * len(g.steps)))
        for g in true
    ]
    assert sum(map(sum, (g.expected for g in false))) == pytest.approx(
        sum(map(sum, (g.expected for g in true)))
    )
    check = self_check(false, K)
    assert not check.passed
    assert "self-check failed" in complaint(check)


def test_greedy_decoding_leaves_nothing_to_chance() -> None:
    def zero_or_one(generator: np.random.Generator) -> float:
        return float(generator.random() < 0.6)

    true = simulate(zero_or_one, 2)
    assert self_check(true, K, greedy=True).passed
    first = true[0]
    one_off = (first.expected[0] - 1, *first.expected[1:])
    false = [dataclasses.replace(first, expected=one_off), *true[1:]]
    assert self_check(false, K).passed  # a test by chances would not see one draft
    check = self_check(false, K, greedy=True)
    assert not check.passed
    assert "argmax" in complaint(check)


def test_nothing_to_check() -> None:
    generations = simulate(middling, 3, prompts=2)
    assert self_check(generations, 0) is None
    assert self_check(simulate(middling, 3, prompts=2, steps=0), K) is None
    unknown = [dataclasses.replace(g, expected=()) for g in generations]  # vLLM tells no chances
    assert self_check(unknown, K) is None


def test_unlikely_events_that_have_not_happened_are_no_fault() -> None:
    """64 drafts of chance 0.05, none accepted: 4 % of right engines do that."""
    counters = Counters(1)
    counters.add_step(1, 0)
    one = Generation("p", (0, 0), "length", counters, (0.05,), ((1, 0),), 0.0, 1.0)
    check = self_check([one] * 64, 1)
    assert check.z[0] == pytest.approx(-0.05 * 64 / (64 * 0.05 * 0.95) ** 0.5)
    assert check.passed
