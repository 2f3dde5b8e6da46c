"""Statistics of a store, for `draftlab inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.store.store import Store
from draftlab.text.draft_vocabulary import predicted_counts

VOCABULARY_SIZES = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True)
class StoreStatistics:
    """Counts over a whole store.

    Attributes:
        predicted: number of tokens that a head predicts in training.
        coverage: size of a draft vocabulary → share of these tokens that its most frequent tokens
            cover, for sizes up to the first that covers all.
    """

    predicted: int
    coverage: dict[int, float]


def count_predicted(store: Store) -> StoreStatistics:
    """Count the predicted tokens of a store; the hidden states are not read."""
    counts = np.sort(predicted_counts(store, store.identity.vocab_size))[::-1]
    total, distinct = int(counts.sum()), int((counts > 0).sum())
    sizes = [size for size in VOCABULARY_SIZES if size < distinct] + [distinct]
    coverage = {size: float(counts[:size].sum() / max(total, 1)) for size in sizes}
    return StoreStatistics(total, coverage)


def length_histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (upper bound, count) for lengths up to 16, 32, 64, …, without empty ends."""
    buckets = np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), 4)
    counts = np.bincount(buckets)
    return [(2**i, int(counts[i])) for i in range(int(buckets.min()), int(buckets.max()) + 1)]
