"""What a store holds, counted: for `draftlab inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.store.store import Store
from draftlab.text.draft_vocabulary import predicted_counts

SIZES = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True)
class Survey:
    """Counts over a whole store.

    Attributes:
        predicted: tokens that a head is asked for.
        kinds: how many different ones.
        coverage: size of a draft vocabulary → share of predicted tokens that its most frequent
            tokens cover; sizes up to the first that covers all.
        lengths: (longest, records) for each bucket of lengths, by powers of two; none are empty at
            the ends.
    """

    predicted: int
    kinds: int
    coverage: dict[int, float]
    lengths: list[tuple[int, int]]


def survey(store: Store) -> Survey:
    """Reads every record's tokens and spans; states are not touched."""
    counts = np.sort(predicted_counts(store, store.identity.vocab_size))[::-1]
    total, kinds = int(counts.sum()), int((counts > 0).sum())
    enough = [size for size in SIZES if size < kinds] + [kinds]
    coverage = {size: float(counts[:size].sum() / max(total, 1)) for size in enough}
    return Survey(total, kinds, coverage, histogram(store.lengths))


def histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(longest, count) of buckets up to 16, 32, 64, …, from the first used to the last."""
    buckets = np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), 4)
    counts = np.bincount(buckets)
    return [(2**i, int(counts[i])) for i in range(int(buckets.min()), int(buckets.max()) + 1)]
