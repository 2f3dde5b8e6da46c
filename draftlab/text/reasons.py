"""Counts of conversations that are left out, by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from draftlab.formatting import count_text

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

    def lines(self, text: str, noun: str) -> Iterator[str]:
        """Yield a line for each of the most frequent reasons: `text`, their count of `noun`s."""
        for reason, count in self.counts.most_common(MOST):
            yield f"{text} {count_text(count, noun)} (first: {self.first[reason]}): {reason}"
        if len(self.counts) > MOST:
            yield f"{text} {count_text(self.counts.total(), noun)} in all"
