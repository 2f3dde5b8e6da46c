"""The report's self-check: accepted drafts must agree with the chances they were accepted at.

Given what came before, a draft that is judged is accepted with a chance c that the verifier knows
(Σ min(p, q) with draft probabilities, p(draft) without). So accepted − Σ c is a martingale, and its
terms are uncorrelated, between prompts and within one. That gives two estimates of its variance,
and the larger is taken:

- Σ d², with a prompt's difference d = accepted − Σ c: right for many prompts, far too small when a
  handful of unlikely events has not happened yet;
- Σ n·c̄(1 − c̄) over the prompts, with c̄ the mean chance of a prompt's n judged drafts: never below
  the true Σ c(1 − c), since c(1 − c) is concave.

A sampler that is right then fails no more often than the level says; the test is cautious where
chances lie near 0 and 1. It judges every draft position by itself, so that too many at one and too
few at another do not cancel. At T = 0 chances are 0 or 1, and the two must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from draftlab.engine.sampling import Generation
from draftlab.evaluate.results import SelfCheck

LEVEL = 1e-3
"""Chance that a row of a correct engine fails."""
ROUNDING = 1e-4
"""What float32 sums may add to a difference, per judged draft."""


def judged_at(generation: Generation, k: int) -> list[int]:
    """Drafts that were judged at each position: those whose predecessors were all accepted."""
    return [
        sum(drafted > i and accepted >= i for drafted, accepted in generation.steps)
        for i in range(k)
    ]


def self_check(
    generations: Sequence[Generation], k: int, *, greedy: bool = False
) -> SelfCheck | None:
    """Tests accepted against expected counts over prompts.

    Args:
        generations: of one row.
        k: drafts a step.
        greedy: T = 0, where chances are 0 or 1 and nothing is left to chance.

    Returns:
        None when nothing was drafted, or an engine that does not know the chances was measured.
    """
    if k == 0 or any(len(g.expected) != k for g in generations):
        return None
    accepted = np.array([g.counters.accepted_at for g in generations], dtype=float).reshape(-1, k)
    expected = np.array([g.expected for g in generations], dtype=float).reshape(-1, k)
    judged = np.array([judged_at(g, k) for g in generations], dtype=float).reshape(-1, k)
    if judged.sum() == 0:
        return None
    if greedy:
        wrong = np.abs((accepted - expected).sum(0)) > ROUNDING * judged.sum(0)
        return SelfCheck(z=[None] * k, p_value=float(not wrong.any()), passed=not wrong.any())
    scores = [_score(*columns) for columns in zip(accepted.T, expected.T, judged.T, strict=True)]
    most = max(abs(z) for z in scores if z is not None)
    # Bonferroni: any of the positions may fail the row
    tested = sum(z is not None for z in scores)
    p_value = min(1.0, tested * math.erfc(most / math.sqrt(2)))
    return SelfCheck(z=scores, p_value=p_value, passed=p_value >= LEVEL)


def _score(accepted: np.ndarray, expected: np.ndarray, judged: np.ndarray) -> float | None:
    """Standard normal score of one position from each prompt's counts; None if none was judged."""
    total = judged.sum()
    if total == 0:
        return None
    difference = accepted - expected
    mean = np.divide(expected, judged, out=np.zeros_like(expected), where=judged > 0).clip(0, 1)
    variance = max((difference**2).sum(), (judged * mean * (1 - mean)).sum())
    excess = difference.sum()
    # Summed float32 chances: a difference this small is rounding, whatever the variance says.
    if abs(excess) <= ROUNDING * total:
        return 0.0
    return float(excess / math.sqrt(variance))


def complaint(check: SelfCheck) -> str | None:
    """The warning of a row that fails; None where it passes."""
    if check.passed:
        return None
    scores = [(abs(z), i, z) for i, z in enumerate(check.z, 1) if z is not None]
    found = "the accepted drafts are not those that the target's argmax allows"
    if scores:
        size, position, z = max(scores)
        found = (
            f"at draft position {position} the accepted drafts are {size:.1f} standard deviations "
            f"{'above' if z > 0 else 'below'} their expectation (p = {check.p_value:.1g})"
        )
    return (
        f"self-check failed: {found}; a fault of the sampler or the verifier, so do not trust "
        "this row"
    )
