"""The report's self-check: the accepted drafts must agree with their acceptance probabilities.

Given what came before, a draft that is reached is accepted with a probability c that the verifier
knows (Σ min(p, q) with draft probabilities, p(draft) without). So accepted − Σ c is a martingale,
and its terms are uncorrelated, between prompts and within one. The check takes the larger of two
estimates of its variance:

- Σ d², with a prompt's difference d = accepted − Σ c: right for many prompts, but far too small
  while a handful of unlikely events has not happened yet;
- Σ n·c̄(1 − c̄) over the prompts, with c̄ the mean probability of the n reached drafts of a prompt:
  never below the true Σ c(1 − c), since c(1 − c) is concave.

A report of a correct sampler then fails no more often than `LEVEL` says, whatever its number of
rows (Bonferroni); the test is conservative if the probabilities lie near 0 and 1. Every draft
position is tested by itself, so that an excess at one position cannot cancel a deficit at another.

At T = 0 the check is bookkeeping: the verifier makes both counts of the same comparison, so they
must be equal, and a wrong comparison does not show. It shows in the tokens, which are compared with
those of plain decoding (`Row.prompts_equal`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from draftlab.engine.sampling import Generation
from draftlab.evaluate.results import SelfCheck
from draftlab.formatting import p_text

LEVEL = 1e-3
"""Probability that some row of a correct engine's report fails."""
ROUNDING = 1e-4
"""Largest rounding error of float32 sums per reached draft."""


def reached_per_position(generation: Generation, k: int) -> list[int]:
    """Return how many drafts were reached at each position: all drafts before were accepted."""
    return [
        sum(drafted > i and accepted >= i for drafted, accepted in generation.steps)
        for i in range(k)
    ]


def self_check(
    generations: Sequence[Generation], k: int, *, greedy: bool = False, rows: int = 1
) -> SelfCheck | None:
    """Test accepted against expected counts over the prompts of one row.

    Args:
        generations: one per prompt.
        k: drafts a step.
        greedy: T = 0, where the probabilities are 0 or 1 and the counts must be equal.
        rows: tested rows of the report, which share `LEVEL`.

    Returns:
        The result; None if nothing was drafted or the engine does not report probabilities.
    """
    if k == 0 or any(len(g.expected) != k for g in generations):
        return None
    accepted, expected, reached = (
        np.array(list(counts), dtype=float).reshape(-1, k)
        for counts in (
            (g.counters.accepted_at for g in generations),
            (g.expected for g in generations),
            (reached_per_position(g, k) for g in generations),
        )
    )
    if reached.sum() == 0:
        return None
    if greedy:
        wrong = np.abs((accepted - expected).sum(0)) > ROUNDING * reached.sum(0)
        return SelfCheck(z=[None] * k, p_value=float(not wrong.any()), passed=not wrong.any())
    scores = [_score(*columns) for columns in zip(accepted.T, expected.T, reached.T, strict=True)]
    tested = [abs(z) for z in scores if z is not None]
    # Bonferroni: any of the positions may fail the row
    p_value = min(1.0, len(tested) * math.erfc(max(tested) / math.sqrt(2)))
    level = LEVEL / rows
    return SelfCheck(z=scores, p_value=p_value, passed=p_value >= level, level=level)


def _score(accepted: np.ndarray, expected: np.ndarray, reached: np.ndarray) -> float | None:
    """Return the standard normal score of one position; None if no draft reached it.

    All arrays hold one number per prompt.
    """
    total = reached.sum()
    if total == 0:
        return None
    difference = accepted - expected
    mean = np.divide(expected, reached, out=np.zeros_like(expected), where=reached > 0).clip(0, 1)
    variance = max((difference**2).sum(), (reached * mean * (1 - mean)).sum())
    excess = difference.sum()
    # A difference this small is rounding of float32 sums, for any variance.
    if abs(excess) <= ROUNDING * total:
        return 0.0
    return float(excess / math.sqrt(variance))


def failure_message(check: SelfCheck) -> str | None:
    """Return the warning for a failed self-check; None if it passed."""
    if check.passed:
        return None
    scores = [(abs(z), i, z) for i, z in enumerate(check.z, 1) if z is not None]
    if not scores:  # T = 0
        return (
            "self-check failed: the counted drafts are not those that the verifier accepted. The "
            "engine's bookkeeping is faulty, so do not trust this row"
        )
    size, position, z = max(scores)
    return (
        f"self-check failed: at draft position {position} the accepted drafts are {size:.1f} "
        f"standard deviations {'above' if z > 0 else 'below'} their expectation "
        f"({p_text(check.p_value)}). The sampler or the verifier is faulty, so do not trust "
        "this row"
    )
