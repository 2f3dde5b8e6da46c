"""Goodness of fit: Wilks' G-test of counts against known cells, and the samples it needs.

Only sums, logarithms and the incomplete gamma function of torch: the product needs no scipy, which
checks these figures in the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

RARE = 5.0  # cells that expect fewer are pooled, as the chi-square approximation wants it


@dataclass(frozen=True)
class GTest:
    """G of counts against a distribution; infinite when an impossible outcome was seen."""

    statistic: float
    freedom: int
    p_value: float


def chi2_sf(x: float, freedom: float) -> float:
    """P(chi-square > x)."""
    if not math.isfinite(x):
        return 0.0
    return float(torch.special.gammaincc(_double(freedom / 2), _double(x / 2)))


@lru_cache
def chi2_isf(level: float, freedom: float) -> float:
    """The x that a chi-square exceeds with probability `level`."""
    return _rising(lambda x: -chi2_sf(x, freedom), -level)


def noncentral_chi2_sf(x: float, freedom: float, noncentrality: float) -> float:
    """P(noncentral chi-square > x): central ones, mixed by a Poisson count of extra freedom."""
    half = noncentrality / 2
    reach = int(half + 12 * math.sqrt(half) + 40)
    count = torch.arange(reach, dtype=torch.float64)
    weight = torch.exp(torch.xlogy(count, _double(half)) - half - torch.lgamma(count + 1))
    tail = torch.special.gammaincc(freedom / 2 + count, _double(x / 2).expand(reach))
    return min(float((weight * tail).sum()), 1.0)


def g_test(seen: np.ndarray, probability: np.ndarray) -> GTest:
    """Tests counts against the cells' exact probabilities.

    Args:
        seen: counts, any shape.
        probability: of the same cells, summing to one.

    Returns:
        The test, cells that expect fewer than `RARE` pooled into one.
    """
    seen, probability = _same_cells(seen, probability)
    if seen[probability == 0].sum() > 0:
        return GTest(math.inf, 1, 0.0)
    total = seen.sum()
    expected = _pool(probability, probability * total) * total
    seen = _pool(seen, probability * total)
    terms = seen * np.log(np.where(seen > 0, seen, 1) / np.where(expected > 0, expected, 1))
    statistic, freedom = float(2 * terms.sum()), max(int((expected > 0).sum()) - 1, 1)
    return GTest(statistic, freedom, chi2_sf(statistic, freedom))


def power(samples: int, probability: np.ndarray, faulty: np.ndarray, level: float) -> float:
    """Chance that `samples` draws from `faulty` are rejected at `level`.

    G is then close to a noncentral chi-square with noncentrality 2 · samples · KL(faulty ‖ exact);
    one impossible outcome rejects by itself.
    """
    probability, faulty = _same_cells(probability, faulty)
    impossible = float(faulty[probability == 0].sum())
    unseen = (1 - min(impossible, 1.0)) ** samples
    true, false = (_pool(cells, probability * samples) for cells in (probability, faulty))
    true, false = true[true > 0], false[true > 0]
    if false.sum() == 0:
        return 1 - unseen
    false /= false.sum()
    divergence = float((false * np.log(np.where(false > 0, false, 1) / true)).sum())
    freedom = max(len(true) - 1, 1)
    border = chi2_isf(level, freedom)
    return 1 - unseen * (1 - noncentral_chi2_sf(border, freedom, 2 * samples * max(divergence, 0)))


def samples_for(
    wanted: float, probability: np.ndarray, faulty: np.ndarray, level: float, limit: int = 10**7
) -> int | None:
    """The fewest samples (within 1 %) whose `power` is `wanted`; None beyond `limit`."""
    low, high = 0, 64
    while power(high, probability, faulty, level) < wanted:
        if high >= limit:
            return None
        low, high = high, min(2 * high, limit)
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        if power(middle, probability, faulty, level) < wanted:
            low = middle
        else:
            high = middle
    return high


def _same_cells(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise ValueError(f"expected the same cells twice, found {a.shape} and {b.shape}")
    return a.ravel(), b.ravel()


def _pool(values: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """`values` of common cells, then the sum over the rare ones; impossible cells are left out."""
    common, rare = expected >= RARE, (expected < RARE) & (expected > 0)
    return np.append(values[common], values[rare].sum()) if rare.any() else values[common]


def _rising(function: Callable[[float], float], value: float) -> float:
    """Where a rising function of x >= 0 takes a value, by bisection."""
    low, high = 0.0, 1.0
    while function(high) < value:
        low, high = high, 2 * high
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < value else (low, middle)
    return high


def _double(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64)
