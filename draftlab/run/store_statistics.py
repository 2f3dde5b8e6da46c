"""Statistics of a store, for `draftlab inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftlab.store.prompt_split import hold_out
from draftlab.store.store import Store
from draftlab.text.draft_vocabulary import predicted_counts

VOCABULARY_SIZES = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
HELD_OUT = 0.2
"""Share of the prompts whose tokens the coverage is about."""


@dataclass(frozen=True)
class StoreStatistics:
    """Counts over a whole store.

    Attributes:
        predicted: number of tokens that a head predicts in training.
        coverage: size of a draft vocabulary → share of the predicted tokens of a fifth of the
            prompts that the most frequent tokens of the other prompts cover, for sizes up to that
            of all their tokens; empty if all records answer one prompt.
    """

    predicted: int
    coverage: dict[int, float]


def count_predicted(store: Store) -> StoreStatistics:
    """Count the predicted tokens of a store; the hidden states are not read."""
    parts = hold_out(store.ids, HELD_OUT, seed=0)
    chosen, unseen = (predicted_counts(store, store.identity.vocab_size, x)[0] for x in parts)
    distinct, judged = int((chosen > 0).sum()), int(unseen.sum())
    sizes = [size for size in VOCABULARY_SIZES if size < distinct] + [distinct]
    found = unseen[np.argsort(-chosen, kind="stable")]
    coverage = {size: float(found[:size].sum() / judged) for size in sizes if judged}
    return StoreStatistics(int(chosen.sum()) + judged, coverage)


def length_histogram(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return (upper bound, count) for lengths up to 16, 32, 64, …, without empty ends."""
    buckets = np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))).astype(int), 4)
    counts = np.bincount(buckets)
    return [(2**i, int(counts[i])) for i in range(int(buckets.min()), int(buckets.max()) + 1)]
