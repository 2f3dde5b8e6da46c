"""Fits of confidence to what was accepted, from left to right (methods §6.7).

A draft's calibrated probability is σ(slope · s + intercept), with s its raw confidence's logit. The
survival of position k is the product over the drafts up to k. Each position is fitted on whether
the first k + 1 drafts were accepted, with the fits of the positions before it kept, so that errors
of a prefix do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit, logit

from draftlab.evaluate.calibration.blocks import DraftBlocks
from draftlab.evaluate.calibration.error import calibration_error

TEMPERATURES = np.logspace(-1, 1, 41)
"""Temperatures that are tried, those of SGLang's fit (servers §13)."""
RIDGE = 1e-3
"""Weight of the squared distance from slope 1 and intercept 0, against the summed log-loss. It
decides where all outcomes are equal."""
_BOUNDS = ((0.0, 20.0), (-20.0, 20.0))
"""Bounds of slope and intercept: a larger raw confidence never means a smaller probability."""
_SMALLEST = 1e-12


def survival(
    confidence: np.ndarray, slopes: Sequence[float], intercepts: Sequence[float]
) -> np.ndarray:
    """Return the probability that the first k + 1 drafts are accepted, float64 [N, K].

    Args:
        confidence: logits [N, K].
        slopes, intercepts: of each position.
    """
    return np.cumprod(expit(confidence * np.array(slopes) + np.array(intercepts)), axis=1)


def fit_logistic(blocks: DraftBlocks) -> tuple[list[float], list[float]]:
    """Return slope and intercept of each position, by maximum likelihood of the survival."""
    slopes: list[float] = []
    intercepts: list[float] = []
    prefix = np.ones(len(blocks))
    for position in range(blocks.k):
        rows, survived = blocks.survivors(position)
        logits = blocks.confidence[:, position]
        slope, intercept = _fit_position(logits[rows], prefix[rows], survived)
        slopes.append(slope)
        intercepts.append(intercept)
        prefix = prefix * expit(slope * logits + intercept)
    return slopes, intercepts


def _fit_position(
    logits: np.ndarray, prefix: np.ndarray, survived: np.ndarray
) -> tuple[float, float]:
    """Return the slope and intercept with the largest likelihood of prefix · σ(·)."""

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        slope, intercept = parameters
        chance = expit(slope * logits + intercept)
        joint = (prefix * chance).clip(_SMALLEST, 1 - _SMALLEST)
        value = -np.where(survived, np.log(joint), np.log1p(-joint)).sum()
        # d(log-loss)/d(logit of the draft's chance)
        gradient = np.where(survived, chance - 1, joint * (1 - chance) / (1 - joint))
        distance = parameters - np.array([1.0, 0.0])
        return (
            value + RIDGE * float(distance @ distance),
            np.array([gradient @ logits, gradient.sum()]) + 2 * RIDGE * distance,
        )

    # The loss of a survival is not convex: far outside, where all chances are 0 or 1, it is flat.
    # One search starts at the raw confidence, the other at the mean acceptance.
    mean = survived.sum() / max(prefix.sum(), 1.0)
    starts = (1.0, 0.0), (0.0, float(logit(np.clip(mean, 1e-3, 1 - 1e-3))))
    searches = [
        minimize(loss, start, jac=True, method="L-BFGS-B", bounds=_BOUNDS) for start in starts
    ]
    best = min(searches, key=lambda search: search.fun)
    return float(best.x[0]), float(best.x[1])


def fit_temperatures(
    blocks: DraftBlocks, grid: Sequence[float] | np.ndarray = TEMPERATURES
) -> list[float]:
    """Return each position's temperature by sequential temperature scaling.

    The temperature of position k has the smallest calibration error of Π_{j≤k} σ(s_j / T_j); of
    equal ones the smallest temperature (DSpark, arXiv 2607.05147).
    """
    temperatures: list[float] = []
    prefix = np.ones(len(blocks))
    for position in range(blocks.k):
        rows, survived = blocks.survivors(position)
        logits = blocks.confidence[:, position]
        errors = [calibration_error(prefix[rows] * expit(logits[rows] / t), survived) for t in grid]
        temperatures.append(float(grid[int(np.argmin(errors))]))
        prefix = prefix * expit(logits / temperatures[-1])
    return temperatures


def fit_common_temperature(
    blocks: DraftBlocks, grid: Sequence[float] | np.ndarray = TEMPERATURES
) -> float:
    """Return the one temperature with the smallest mean calibration error over the positions."""
    errors = []
    for temperature in grid:
        predicted = np.cumprod(expit(blocks.confidence / temperature), axis=1)
        of_positions = []
        for position in range(blocks.k):
            rows, survived = blocks.survivors(position)
            of_positions.append(calibration_error(predicted[rows, position], survived))
        errors.append(np.mean(of_positions))
    return float(grid[int(np.argmin(errors))])
