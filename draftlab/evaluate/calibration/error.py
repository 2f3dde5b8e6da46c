"""Expected calibration error, what a perfect predictor would show, and reliability bins."""

from __future__ import annotations

import numpy as np

from draftlab.evaluate.calibration.result import ReliabilityBin

NUM_BINS = 15
SIMULATIONS = 200


def bin_numbers(predicted: np.ndarray) -> np.ndarray:
    """Return the bin of each prediction, int64 [N]: `NUM_BINS` bins of equal width on [0, 1]."""
    return (predicted * NUM_BINS).astype(np.int64).clip(0, NUM_BINS - 1)


def calibration_error(predicted: np.ndarray, observed: np.ndarray) -> float:
    """Return the expected calibration error of predictions [N] of outcomes [N].

    It is Σ_b n_b / N · |mean prediction − share of outcomes| over bins b.
    """
    differences = np.bincount(bin_numbers(predicted), predicted - observed)
    return float(np.abs(differences).sum() / len(predicted))


def perfect_error(predicted: np.ndarray, samples: int = SIMULATIONS) -> float:
    """Return the mean error of a perfectly calibrated predictor on as many outcomes, which are
    drawn from the predictions themselves.
    """
    generator = np.random.default_rng(0)
    errors = [
        calibration_error(predicted, generator.random(len(predicted)) < predicted)
        for _ in range(samples)
    ]
    return float(np.mean(errors))


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
