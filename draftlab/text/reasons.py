"""Counts of conversations that are left out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

MOST = 5
"""Number of reasons that are reported. Reasons quote texts, so there may be many of them."""


class Reasons:
    """Counts by reason, and the first id of each reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, id_: str, count: int = 1) -> None:
        """Add to the count of a reason."""
        self.counts[reason] += count
        self.first.setdefault(reason, id_)

    def lines(self, text: str) -> Iterator[str]:
        """Yield a line for each of the most frequent reasons; "{}" in `text` is its count."""
        for reason, count in self.counts.most_common(MOST):
            yield f"{text.format(f'{count:,}')} (first: {self.first[reason]}): {reason}"
        if len(self.counts) > MOST:
            yield text.format(f"{self.counts.total():,}") + " in all"
