"""What is made from counts and answers: intervals over prompts, and how much answers repeat."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import NormalDist

import numpy as np

from draftlab.engine.counters import Counters


def repetition_rate(answers: Iterable[Sequence[int]], n: int = 4) -> float:
    """Mean over answers of the share of n-grams that repeat an earlier one of the same answer.

    Answers shorter than n tokens have no n-gram and do not count.
    """
    shares = []
    for answer in answers:
        grams = Counter(tuple(answer[i : i + n]) for i in range(len(answer) - n + 1))
        if grams:
            shares.append(1 - len(grams) / grams.total())
    return float(np.mean(shares)) if shares else 0.0


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float],
    count: int,
    *,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap over prompts.

    Args:
        statistic: from an index array [count] of resampled prompts to the figure.
        count: number of prompts.
        samples: number of resamples.
        level: confidence.
        seed: of numpy's generator, local to this call.

    Returns:
        Lower and upper end.
    """
    generator = np.random.default_rng(seed)
    values = [statistic(generator.integers(0, count, count)) for _ in range(samples)]
    return percentile_interval(np.array(values), level)


def resampled(*figures: np.ndarray, samples: int = 2000, seed: int = 0) -> list[np.ndarray]:
    """Sums [samples] over resampled prompts of figures [P], the same prompts for all.

    What a bootstrap of ratios of sums needs, all resamples at once.
    """
    count = len(figures[0])
    index = np.random.default_rng(seed).integers(0, count, (samples, count))
    return [values[index].sum(1) for values in figures]


def percentile_interval(values: np.ndarray, level: float) -> tuple[float, float]:
    """Lower and upper end that hold a share `level` of the values; NaN counts as none."""
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def acceptance_interval(
    per_prompt: Sequence[Counters], *, samples: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float] | None:
    """Bootstrap interval of AL over prompts (a ratio of sums); None when nothing was drafted."""
    drafts = np.array([c.drafts for c in per_prompt], dtype=float)
    if drafts.sum() == 0:
        return None
    accepted = np.array([c.accepted for c in per_prompt], dtype=float)
    accepted, drafts = resampled(accepted, drafts, samples=samples, seed=seed)
    with np.errstate(invalid="ignore"):  # resamples without a draft have no AL
        return percentile_interval(1 + accepted / drafts, level)


def share_interval(hits: int, count: int, *, level: float = 0.999) -> tuple[float, float]:
    """Wilson's interval of a share of which `hits` of `count` were seen; all of it for none."""
    if count == 0:
        return 0.0, 1.0
    z, share = NormalDist().inv_cdf((1 + level) / 2), hits / count
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    whole = 1 + z * z / count
    return (middle - width) / whole, (middle + width) / whole
