"""Calibration errors: equal to a plain sum over bins, and to what theory says of perfect ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftlab.evaluate.calibration.error import calibration_error, perfect_error, reliability_bins


def plain_error(predicted: list[float], observed: list[bool]) -> float:
    """Return the error by its definition, one bin after the other."""
    total = 0.0
    for b in range(15):
        low, high = b / 15, (b + 1) / 15
        members = [
            (p, o)
            for p, o in zip(predicted, observed, strict=True)
            if low <= p < high or (b == 14 and p == 1.0)
        ]
        if members:
            mean = sum(p for p, _ in members) / len(members)
            share = sum(o for _, o in members) / len(members)
            total += len(members) / len(predicted) * abs(mean - share)
    return total


def test_the_error_is_its_definition() -> None:
    generator = np.random.default_rng(1)
    predicted = np.concatenate([generator.random(500), [0.0, 1.0, 1.0]])
    observed = generator.random(503) < predicted**1.5
    expected = plain_error(predicted.tolist(), observed.tolist())
    assert calibration_error(predicted, observed) == pytest.approx(expected, abs=1e-12)
    bins = reliability_bins(predicted, observed)
    assert sum(b.count for b in bins) == 503
    from_bins = sum(b.count * abs(b.predicted - b.observed) for b in bins) / 503
    assert from_bins == pytest.approx(expected, abs=1e-12)


def test_a_perfect_predictor_errs_as_much_as_a_mean_of_coins() -> None:
    """With one bin of n coins, |share − p| is half normal: its mean is √(2 p (1 − p) / (π n))."""
    n, p = 4000, 0.3
    mean = perfect_error(np.full(n, p), samples=2000)
    deviation = math.sqrt(p * (1 - p) / n)
    assert mean == pytest.approx(deviation * math.sqrt(2 / math.pi), rel=0.05)
    assert perfect_error(np.full(n, p)) == perfect_error(np.full(n, p))  # seeded
