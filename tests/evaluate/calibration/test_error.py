"""Calibration errors: equal to a plain sum over bins, and to what theory says of perfect ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from draftlab.evaluate.calibration.error import (
    brier_skill,
    calibration_error,
    error_interval,
    perfect_error,
    reliability_bins,
)


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
    assert math.isnan(calibration_error(np.zeros(0), np.zeros(0)))


def test_a_perfect_predictor_errs_as_much_as_a_mean_of_coins() -> None:
    """With one bin of n coins, |share − p| is half normal: its mean is √(2 p (1 − p) / (π n))."""
    n, p = 4000, 0.3
    mean, high = perfect_error(np.full(n, p), samples=2000)
    deviation = math.sqrt(p * (1 - p) / n)
    assert mean == pytest.approx(deviation * math.sqrt(2 / math.pi), rel=0.05)
    assert high == pytest.approx(2.24 * deviation, rel=0.06)
    assert perfect_error(np.full(n, p)) == perfect_error(np.full(n, p))  # seeded


def test_intervals_resample_whole_prompts() -> None:
    generator = np.random.default_rng(2)
    predicted = generator.random(3000)
    observed = generator.random(3000) < predicted
    assert error_interval(predicted, observed, np.arange(3000) % 5) is None
    # A prompt whose blocks are equal is one observation, not thirty.
    prompt = np.repeat(np.arange(100), 30)
    copies, outcomes = np.repeat(predicted[:100], 30), np.repeat(observed[:100], 30)
    wide = error_interval(copies, outcomes, prompt)
    narrow = error_interval(predicted, observed, prompt)
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_the_noise_of_resamples_is_taken_off_an_interval() -> None:
    """Eight prompts err by 0.5, half of them in the opposite direction, so together by 0.

    A resample of h such prompts errs by |h / 8 − 1/2|, by 0.137 on average and by 1/2 at most.
    """
    outcomes = np.arange(8) % 2 == 0
    interval = error_interval(np.full(8, 0.5), outcomes, np.arange(8), samples=20_000)
    assert interval == pytest.approx((0.0, 0.5 - 0.137), abs=0.02)


def test_skill_is_what_confidence_tells_beyond_the_mean() -> None:
    observed = np.array([True, False, True, False])
    assert brier_skill(observed.astype(float), observed) == 1.0
    assert brier_skill(np.full(4, 0.5), observed) == 0.0
    assert brier_skill(np.ones(4), np.ones(4, dtype=bool)) is None
