"""The survival of single drafts, from their confidence, calibrated to what is accepted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftlab.engine.step_costs import ShapeFamily

Array = np.ndarray
PRIOR, NEWTON_STEPS = 4.0, 4
LARGEST_CONFIDENCE = 32.0  # a logit; 1 − σ(32) is below float32's resolution


class SurvivalModel:
    """Logistic calibration of confidence by depth over a window of rows.

    P(accepted) = σ(scale · confidence + bias), and a draft's survival is the product over its depth
    and those before.

    Args:
        k: most drafts a row.
        window: recent rows of steps that are kept.

    Attributes:
        scale, bias: float64 [K]; 1 and 0 at first, the confidence as it is.
    """

    def __init__(self, k: int, window: int) -> None:
        self.k, self.window = k, window
        self.scale, self.bias = np.ones(k), np.zeros(k)
        self._confidence = np.full((window, k), np.nan)  # NaN behind the stored drafts
        self._tested, self._hit = np.zeros((2, window, k), dtype=bool)
        self._rows_seen = 0

    @property
    def is_known(self) -> bool:
        """Return whether the window is full."""
        return self._rows_seen >= self.window

    def add(self, accepted: Array, num_drafts: Array, confidence: Array) -> None:
        """Take in the results of rows of steps, the latest last.

        Args:
            accepted, num_drafts: int [B]; rows with num_drafts ≤ 0 verified nothing.
            confidence: float [B, k] of the drafts that were stored, k ≤ K.
        """
        rows = np.flatnonzero(num_drafts > 0)[-self.window :]
        count, k = len(rows), confidence.shape[1]
        if not count or not k:
            return
        depth = np.arange(self.k)
        at = (self._rows_seen + np.arange(count)) % self.window
        self._confidence[at] = np.nan
        self._confidence[at[:, None], depth[:k]] = confidence[rows].clip(
            -LARGEST_CONFIDENCE, LARGEST_CONFIDENCE
        )
        accepted, num_drafts = accepted[rows, None], num_drafts[rows, None]
        self._hit[at] = depth < accepted
        self._tested[at] = depth < np.minimum(accepted + 1, num_drafts)
        self._rows_seen += count

    def survival(self) -> Array:
        """Return the survival of drafts in the window, float64 [rows, K].

        Where no draft was stored, its confidence is the mean of its depth, or of the depth before
        where that has none.
        """
        logits = self._confidence[: self._rows_seen] * self.scale + self.bias
        confidence = 1 / (1 + np.exp(-logits))
        known = ~np.isnan(confidence)
        mean = 1.0
        for depth in range(self.k):
            column = confidence[:, depth]
            if known[:, depth].any():
                mean = float(column[known[:, depth]].mean())
            column[~known[:, depth]] = mean
        return confidence.cumprod(1)

    def fit(self) -> None:
        """Fit the logistic regression of each depth to the window, by Newton's method.

        A quadratic penalty, as of `PRIOR` observations, holds the fit to the confidence as it is.
        """
        rows = slice(min(self._rows_seen, self.window))
        x = np.nan_to_num(self._confidence[rows])
        tested, hit = self._tested[rows], self._hit[rows]
        for _ in range(NEWTON_STEPS):
            p = 1 / (1 + np.exp(-(x * self.scale + self.bias)))
            error, weight = np.where(tested, hit - p, 0.0), np.where(tested, p * (1 - p), 0.0)
            gradient_scale = (error * x).sum(0) - PRIOR * (self.scale - 1)
            gradient_bias = error.sum(0) - PRIOR * self.bias
            a = (weight * x * x).sum(0) + PRIOR
            b, c = (weight * x).sum(0), weight.sum(0) + PRIOR
            determinant = a * c - b * b
            scale_step = (c * gradient_scale - b * gradient_bias) / determinant
            bias_step = (a * gradient_bias - b * gradient_scale) / determinant
            self.scale = self.scale + scale_step.clip(-1, 1)
            self.bias = self.bias + bias_step.clip(-1, 1)


def accepted_parts(
    survival: Array, families: Sequence[ShapeFamily]
) -> dict[tuple[int, float], float]:
    """Return by K and share which part of all accepted drafts those of the share are."""
    parts = {}
    for family in families:
        flat = np.sort(survival[:, : family.k].astype(np.float32), axis=None)
        largest = flat[::-1].cumsum(dtype=np.float64)
        part = largest[int(family.share * len(largest)) - 1] / largest[-1]
        parts[family.k, family.share] = float(part)
    return parts
