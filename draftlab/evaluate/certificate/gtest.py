"""Wilks' G-test of counts against exact cell probabilities, its power and the samples it needs.

The chi-square distributions and the statistic are scipy's. This module adds the pooling of rare
cells, impossible outcomes and the search for a sample size. `certify.py` runs the test on an
engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy import special, stats

MIN_EXPECTED = 5.0
"""Cells with a smaller expected count are pooled, so that the chi-square approximation holds."""


@dataclass(frozen=True)
class GTest:
    """The result of a G-test; the statistic is infinite if an impossible outcome occurred."""

    statistic: float
    freedom: int
    p_value: float


def g_test(counts: np.ndarray, probability: np.ndarray) -> GTest:
    """Test counts against exact probabilities, with rare cells pooled into one.

    Args:
        counts: observed counts, any shape.
        probability: probabilities of the same cells, which sum to one.
    """
    counts, probability = _flat_cells(counts, probability)
    if counts[probability == 0].sum() > 0:
        return GTest(math.inf, 1, 0.0)
    total = counts.sum()
    expected = _pool(probability, probability * total) * total
    freedom = max(len(expected) - 1, 1)
    result = stats.power_divergence(
        _pool(counts, probability * total),
        expected,
        ddof=len(expected) - 1 - freedom,
        lambda_="log-likelihood",
    )
    return GTest(float(result.statistic), freedom, float(result.pvalue))


def power(samples: int, probability: np.ndarray, faulty: np.ndarray, level: float) -> float:
    """Return the probability that `samples` draws from `faulty` are rejected at `level`.

    G is then close to a noncentral chi-square with noncentrality 2 · samples · KL(faulty ‖ exact).
    A single impossible outcome also rejects.
    """
    probability, faulty = _flat_cells(probability, faulty)
    impossible = float(faulty[probability == 0].sum())
    none_impossible = (1 - min(impossible, 1.0)) ** samples
    exact, shifted = (_pool(cells, probability * samples) for cells in (probability, faulty))
    if shifted.sum() == 0:
        return 1 - none_impossible
    shifted /= shifted.sum()
    divergence = max(float(special.rel_entr(shifted, exact).sum()), 0.0)
    freedom = max(len(exact) - 1, 1)
    rejected = stats.ncx2.sf(_threshold(level, freedom), freedom, 2 * samples * divergence)
    return float(1 - none_impossible * (1 - rejected))


def samples_for(
    target_power: float,
    probability: np.ndarray,
    faulty: np.ndarray,
    level: float,
    limit: int = 10**7,
) -> int | None:
    """Return the fewest samples (within 1 %) that reach a power; None beyond `limit`."""
    low, high = 0, 64
    while power(high, probability, faulty, level) < target_power:
        if high >= limit:
            return None
        low, high = high, min(2 * high, limit)
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        if power(middle, probability, faulty, level) < target_power:
            low = middle
        else:
            high = middle
    return high


@lru_cache
def _threshold(level: float, freedom: int) -> float:
    """Return the chi-square value that is exceeded with probability `level`."""
    return float(stats.chi2.isf(level, freedom))


def _flat_cells(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"expected the same cells twice, found {a.shape} and {b.shape}")
    return a.ravel(), b.ravel()


def _pool(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the values of common cells and the sum over rare ones, without impossible cells."""
    common, rare = expected >= MIN_EXPECTED, (expected < MIN_EXPECTED) & (expected > 0)
    return np.append(values[common], values[rare].sum()) if rare.any() else values[common]
