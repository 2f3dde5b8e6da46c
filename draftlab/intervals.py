"""Confidence intervals, most of them by resampling prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

MIN_INTERVAL_PROMPTS = 6
"""Fewest prompts with an interval: values of five prompts leave out their median once in 16 times,
more often than an interval of 95 % may."""


def bootstrap_interval(
    statistic: Callable[[np.ndarray], float],
    count: int,
    *,
    samples: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the percentile bootstrap interval of a statistic over prompts.

    Args:
        statistic: maps an index array [count] of resampled prompts to a number.
        count: number of prompts.
        samples: number of resamples.
        level: confidence level.
        seed: seed of a local numpy generator.
    """
    values = [statistic(index) for index in resampled_prompts(count, samples, seed)]
    return percentile_interval(np.array(values), level)


def resampled_prompts(count: int, samples: int, seed: int = 0) -> np.ndarray:
    """Return the numbers of the prompts of each resample, int64 [samples, count].

    Every interval draws from here: prompts are independent, the requests, steps and drafts of one
    prompt are not.
    """
    return np.random.default_rng(seed).integers(0, count, (samples, count))


def resample_sums(*values: np.ndarray, samples: int = 2000, seed: int = 0) -> list[np.ndarray]:
    """Return the sums [samples] of values [P] over resampled prompts, the same prompts for all."""
    index = resampled_prompts(len(values[0]), samples, seed)
    return [column[index].sum(1) for column in values]


def sums_by_prompt(prompts: Sequence[int] | np.ndarray, *values: ArrayLike) -> list[np.ndarray]:
    """Return the sums [P] of values [N] over what belongs to each prompt, in order of number.

    Args:
        prompts: the prompt of each value, int [N].
    """
    _, place = np.unique(prompts, return_inverse=True)
    return [np.bincount(place, column) for column in values]


def percentile_interval(values: np.ndarray, level: float) -> tuple[float, float]:
    """Return the ends of the central interval that holds a share `level`; NaN is ignored."""
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def quantile_intervals(
    values: np.ndarray,
    prompts: np.ndarray,
    quantiles: Sequence[float],
    *,
    samples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """Return the bootstrap interval over prompts of each quantile of values [N].

    Args:
        prompts: the prompt of each value, int [N]; values of one prompt are resampled together.
    """
    names, place = np.unique(prompts, return_inverse=True)
    order = np.argsort(place, kind="stable")
    counts = np.bincount(place)
    column = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((len(names), counts.max()), np.nan)  # a row for each prompt
    table[place[order], column] = values[order]
    resampled = table[resampled_prompts(len(names), samples, seed)].reshape(samples, -1)
    quantile = np.quantile if len(values) == table.size else np.nanquantile
    return [percentile_interval(one, level) for one in quantile(resampled, quantiles, axis=1)]


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, level: float = 0.95
) -> tuple[float, float]:
    """Return the bootstrap interval of Σ numerators / Σ denominators over prompts."""
    above, below = resample_sums(np.array(numerators), np.array(denominators))
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN, which the interval ignores
        return percentile_interval(above / below, level)


def share_interval(hits: int, count: int, *, level: float = 0.999) -> tuple[float, float]:
    """Return Wilson's interval of the share `hits` / `count`; (0, 1) if the count is 0."""
    if count == 0:
        return 0.0, 1.0
    z, share = NormalDist().inv_cdf((1 + level) / 2), hits / count
    middle = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    scale = 1 + z * z / count
    return (middle - width) / scale, (middle + width) / scale
