"""The check of the adviser: each timed K is predicted from the others.

The check leaves out one timed K at a time, at all batches, and predicts the speed-up that was
measured there from the steps and the acceptance of the timed prompts at the other values of K
alone. It leaves out values between two others: without the smallest or largest K the prediction
would go beyond the measurements, where the cost of a step may bend, as it does where a kernel needs
a second tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.speedup_model import SpeedupTable

CLOSE = 0.05
"""A prediction is close if its error is at most this, or if it lies in a measured interval whose
half-width is."""


@dataclass(frozen=True)
class Check:
    """A measured speed-up beside its prediction from the other values of K.

    Attributes:
        left_out_speedup: predicted without any measurement with this K.
        error: left_out_speedup / measured speed-up − 1.
        met: whether `left_out_speedup` lies in the interval of the measured speed-up.
        close: whether the error is at most 5 %, or `met` with an interval of ± 5 % or less.
    """

    left_out_speedup: float
    error: float
    met: bool
    close: bool


def check_left_out(table: SpeedupTable, batch: int, k: int) -> Check | None:
    """Return a measured speed-up's prediction from the other K's.

    None: there is none, or the speed-up has no interval that could refute it.
    """
    one = table.measured.get((batch, k))
    if one is None or not one.speedup or one.speedup_ci is None:
        return None
    predicted = table.left_out(batch, k)
    if predicted is None:
        return None
    low, high = one.speedup_ci
    error, met = predicted / one.speedup - 1, low <= predicted <= high
    narrow = high - low <= 2 * CLOSE * one.speedup
    return Check(predicted, error, met, abs(error) <= CLOSE or (met and narrow))


def check_summary(checks: Sequence[Check]) -> dict[str, Any]:
    """Return the counts, errors and text of `report.adviser.check`."""
    errors = [abs(one.error) for one in checks]
    met, close = sum(one.met for one in checks), sum(one.close for one in checks)
    text = "no prediction was checked: too few timed K's"
    mean, worst = (float(np.mean(errors)), max(errors)) if errors else (None, None)
    if mean is not None and worst is not None:
        text = (
            f"{met} of {len(checks)} speed-ups at a timed K, predicted from the other timed K's, "
            f"lie in the measured interval, and {close} are within 5 %; the error is "
            f"{100 * mean:.0f} % on average and {100 * worst:.0f} % at most"
        )
    return {
        "timed": len(checks),
        "met": met,
        "close": close,
        "mean_error": mean,
        "worst_error": worst,
        "text": text,
    }
