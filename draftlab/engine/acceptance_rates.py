"""Estimate how often drafts are accepted at each depth, from steps that verified all of them."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray
FIRST_RATE, PRIOR = 0.5, 2.0
"""Rate of the first draft before anything was seen, and how many drafts it weighs."""
CHANGE_DEVIATIONS = 4.0
"""Standard deviations from which on new counts contradict the old ones."""
ROWS_AFTER_CHANGE = 16.0
"""Rows that the old counts weigh once new ones contradict them."""


class AcceptanceRates:
    """Rates at which drafts are accepted if those before them were, from recent rows.

    Older rows weigh exponentially less. After a sudden change they weigh almost nothing.

    Args:
        k: most drafts a row.
        memory: rows of steps after which a row weighs 1/e.

    Attributes:
        drafted, tested, hit: float64 [K], weighed numbers of rows that had a draft at a depth, that
            reached it, and that accepted it.
    """

    def __init__(self, k: int, memory: int) -> None:
        self.k, self.memory = k, memory
        self.drafted, self.tested, self.hit = np.zeros((3, k))

    def add(self, accepted: Array, num_drafts: Array) -> None:
        """Take in rows of steps, int [N] each; rows with num_drafts ≤ 0 verified nothing."""
        accepted, num_drafts = (x[num_drafts > 0] for x in (accepted, num_drafts))
        if not len(accepted):
            return
        counts = np.bincount(num_drafts * (self.k + 1) + accepted, minlength=(self.k + 1) ** 2)
        counts = counts.reshape(self.k + 1, self.k + 1)  # by num_drafts and accepted
        depth = np.arange(self.k)
        has_draft = np.arange(self.k + 1)[:, None] > depth  # [K + 1, K]
        by_drafts = counts[:, ::-1].cumsum(1)[:, ::-1]  # rows that accepted so many or more
        drafted = (counts.sum(1)[:, None] * has_draft).sum(0)
        tested = (by_drafts[:, :-1] * has_draft).sum(0)
        hit = (by_drafts[:, 1:] * has_draft).sum(0)
        old = math.exp(-len(accepted) / self.memory)
        if self._contradict(tested, hit):
            old = min(old, ROWS_AFTER_CHANGE / self.tested[0])
        self.drafted = old * self.drafted + drafted
        self.tested = old * self.tested + tested
        self.hit = old * self.hit + hit

    def forget(self, rows: int) -> None:
        """Let the rows seen so far weigh no more than `rows`."""
        factor = min(rows / max(self.drafted[0], 1.0), 1.0)
        self.drafted, self.tested, self.hit = (
            factor * counts for counts in (self.drafted, self.tested, self.hit)
        )

    def _contradict(self, tested: Array, hit: Array) -> bool:
        """Return whether new counts contradict the old ones."""
        known = self.tested > 0
        rates, old, new = np.array(self.rates())[known], self.tested[known], tested[known]
        variance = (new * rates * (1 - rates) * (1 + new / old)).sum()
        return bool(
            abs((hit[known] - new * rates).sum()) > CHANGE_DEVIATIONS * math.sqrt(variance + 1)
        )

    def rates(self) -> list[float]:
        """Return the rate of each depth; where little is known it is close to the one before."""
        rate, rates = FIRST_RATE, []
        for hit, tested in zip(self.hit.tolist(), self.tested.tolist(), strict=True):
            rate = (hit + PRIOR * rate) / (tested + PRIOR)
            rates.append(rate)
        return rates

    def expected_tokens(self) -> list[float]:
        """Return the expected tokens of a row of a step that verifies 0, 1, … K drafts."""
        return [1 + mean for mean, _ in self._moments()]

    def overshoot(self) -> list[float]:
        """Return the expected tokens of an answer's last step behind the answer's end, by K.

        An answer ends anywhere in its steps, so most often in one that emits many tokens X. This is
        (E[X²] / E[X] − 1) / 2.
        """
        return [((1 + 2 * mean + square) / (1 + mean) - 1) / 2 for mean, square in self._moments()]

    def standard_error(self, k: int) -> float:
        """Return the standard error of the expected tokens of K = k, relative to them."""
        mean, square = self._moments()[k]
        variance = max(square - mean * mean, 0.0)
        return math.sqrt(variance / (self.tested[0] + PRIOR)) / (1 + mean)

    def _moments(self) -> list[tuple[float, float]]:
        """Return the means of the accepted drafts, and of their squares, for K = 0, 1, …"""
        survival, mean, square, moments = 1.0, 0.0, 0.0, [(0.0, 0.0)]
        for depth, rate in enumerate(self.rates()):
            survival *= rate
            mean += survival
            square += (2 * depth + 1) * survival
            moments.append((mean, square))
        return moments
