"""Wilks' G-test of counts against exact cell probabilities, and the change that it can detect.

The chi-square distributions and the statistic are scipy's. This module adds the pooling of rare
cells and impossible outcomes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    counts, probability = (np.asarray(x, dtype=np.float64) for x in (counts, probability))
    if counts.shape != probability.shape:
        raise ValueError(
            f"expected the same cells twice, found {counts.shape} and {probability.shape}"
        )
    counts, probability = counts.ravel(), probability.ravel()
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


def detectable(samples: int, freedom: int, level: float, power: float = 0.99) -> float:
    """Return the divergence KL(faulty ‖ exact) of the pooled cells that is found with a power.

    G is then close to a noncentral chi-square with noncentrality 2 · samples · KL.
    """
    threshold = stats.chi2.isf(level, freedom)
    return float(special.chndtrinc(threshold, freedom, 1 - power)) / (2 * samples)


def _pool(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the values of common cells and the sum over rare ones, without impossible cells."""
    common, rare = expected >= MIN_EXPECTED, (expected < MIN_EXPECTED) & (expected > 0)
    return np.append(values[common], values[rare].sum()) if rare.any() else values[common]
