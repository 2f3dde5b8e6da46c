"""Expected calibration error, what a perfect predictor would show, and reliability bins."""

from __future__ import annotations

import numpy as np

from draftlab.evaluate.calibration.result import ReliabilityBin
from draftlab.intervals import prompt_interval, resample_sums

NUM_BINS = 15
SIMULATIONS = 200
RESAMPLES = 500


def bin_numbers(predicted: np.ndarray) -> np.ndarray:
    """Return the bin of each prediction, int64 [N]: `NUM_BINS` bins of equal width on [0, 1]."""
    return (predicted * NUM_BINS).astype(np.int64).clip(0, NUM_BINS - 1)


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Return the expected calibration error of predictions [N] of outcomes [N]; NaN if N = 0.

    It is Σ_b n_b / N · |mean prediction − share of outcomes| over bins b.
    """
    if not len(predicted):
        return float("nan")
    differences = np.bincount(bin_numbers(predicted), predicted - observed)
    return float(np.abs(differences).sum() / len(predicted))


def perfect_error(predicted: np.ndarray, samples: int = SIMULATIONS) -> tuple[float, float]:
    """Return the error that a perfectly calibrated predictor shows on as many outcomes.

    Outcomes are drawn from the predictions themselves.

    Returns:
        The mean of the error over the simulations, and its 97.5 % quantile.
    """
    generator = np.random.default_rng(0)
    errors = [
        calibration_error(predicted, generator.random(len(predicted)) < predicted)
        for _ in range(samples)
    ]
    return float(np.mean(errors)), float(np.quantile(errors, 0.975))


def error_interval(
    predicted: np.ndarray, observed: np.ndarray, prompt: np.ndarray, samples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the 95 % bootstrap interval of the calibration error over prompts; None: too few.

    A resample adds noise of its own to each bin, which raises its error. The interval is shifted
    down by the mean of this rise, and ends at 0.
    """
    differences, sizes = _prompt_differences(predicted, observed, prompt)
    *drawn, blocks = resample_sums(*differences.T, sizes, samples=samples)
    errors = np.abs(drawn).sum(0) / blocks
    rise = errors.mean() - np.abs(differences.sum(0)).sum() / sizes.sum()
    interval = prompt_interval(errors - max(rise, 0.0), len(sizes))
    return interval and (max(interval[0], 0.0), interval[1])


def _prompt_differences(
    predicted: np.ndarray, observed: np.ndarray, prompt: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return Σ (predicted − observed) of each prompt in each bin, [P, NUM_BINS], and blocks [P]."""
    _, number = np.unique(prompt, return_inverse=True)
    sizes = np.bincount(number)
    cell = number * NUM_BINS + bin_numbers(predicted)
    sums = np.bincount(cell, predicted - observed, minlength=len(sizes) * NUM_BINS)
    return sums.reshape(len(sizes), NUM_BINS), sizes


def brier_skill(predicted: np.ndarray, observed: np.ndarray) -> float | None:
    """Return the share of the outcomes' variance that the predictions explain.

    It is 1 − Σ (p − y)² / Σ (ȳ − y)²: 0 of a constant prediction, 1 of a certain one. None if all
    outcomes are equal. A calibrated predictor may say little; this tells how much it says.
    """
    variance = float(((observed.mean() - observed) ** 2).sum()) if len(observed) else 0.0
    return 1 - float(((predicted - observed) ** 2).sum()) / variance if variance else None


def reliability_bins(predicted: np.ndarray, observed: np.ndarray) -> list[ReliabilityBin]:
    """Return the bins that have predictions, in ascending order."""
    number = bin_numbers(predicted)
    counts = np.bincount(number, minlength=NUM_BINS)
    sums = (np.bincount(number, values, minlength=NUM_BINS) for values in (predicted, observed))
    return [
        ReliabilityBin(count=int(n), predicted=float(p / n), observed=float(o / n))
        for n, p, o in zip(counts, *sums, strict=True)
        if n
    ]
