"""The draft vocabulary: which tokens of the target's vocabulary a head can draft (methods §1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.masks import prediction_mask
from draftlab.store.store import Store


@dataclass(frozen=True)
class DraftVocabulary:
    """The target tokens that a head can draft.

    Attributes:
        target_ids: int64 [D], ascending; draft id i is target id target_ids[i].
        coverage: the share of the store's predicted tokens (counting repeats) that it contains.
    """

    target_ids: Tensor
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """Return int64 [D] offsets: target id = i + d2t[i]."""
        return self.target_ids - torch.arange(len(self.target_ids))

    def t2d(self, vocab_size: int) -> Tensor:
        """Return bool [V]: whether each target id is in the draft vocabulary."""
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[self.target_ids] = True
        return mask


def build_draft_vocabulary(
    store: Store,
    size: int | None,
    required: Iterable[int],
    excluded: Iterable[int],
    vocab_size: int,
) -> DraftVocabulary:
    """Choose the most frequent predicted tokens of a store; the lowest id wins a tie.

    If fewer than D different tokens occur, the lowest unused ids fill the vocabulary.

    Args:
        store: the data set whose `prediction_mask` tokens are counted.
        size: D; None or ≥ V: all ids except `excluded`.
        required: stop ids and special tokens; those that occur among the predicted tokens are
            always chosen. (Llama 3 alone has 250 special tokens that never occur.)
        excluded: ids that are never chosen, such as the mask token.
        vocab_size: V of the target.

    Raises:
        UserError: size is below the number of required tokens that occur, or not reachable.
        ValueError: ids outside the vocabulary.
    """
    required, excluded = set(required), set(excluded)
    if any(not 0 <= i < vocab_size for i in required | excluded):
        raise ValueError(
            f"expected ids in 0..{vocab_size - 1}, found {sorted(required | excluded)}"
        )
    counts = predicted_counts(store, vocab_size)
    chosen = np.ones(vocab_size, dtype=bool)
    chosen[list(excluded)] = False
    if size is not None and size < vocab_size:
        chosen = _choose(counts, chosen, required, size)
    total = counts.sum()
    coverage = float(counts[chosen].sum() / total) if total else 0.0
    return DraftVocabulary(torch.from_numpy(np.flatnonzero(chosen)), coverage)


def predicted_counts(store: Store, vocab_size: int) -> np.ndarray:
    """Count how often each target token is a `prediction_mask` token of a store, int64 [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(store)):
        tokens, spans = store.tokens_and_spans(index)
        counts += np.bincount(tokens[prediction_mask(spans)].numpy(), minlength=vocab_size)
    return counts


def _choose(counts: np.ndarray, allowed: np.ndarray, required: set[int], size: int) -> np.ndarray:
    """Return bool [V] with `size` chosen ids."""
    first = np.zeros_like(allowed)
    first[[i for i in required if counts[i] > 0]] = True
    first &= allowed
    if first.sum() > size:
        raise UserError(
            f"expected a draft vocabulary of at least {first.sum()}, the stop ids and special "
            f"tokens that occur in answers; found {size}",
            do="raise draft_vocab.size",
        )
    if allowed.sum() < size:
        raise UserError(
            f"a draft vocabulary of {size} leaves no room for the mask token",
            do="lower draft_vocab.size by one",
        )
    # The last key counts first: allowed ids, then required ids, then frequent ids, then low ids.
    # Tokens that never occur have count 0, so the lowest unused ids follow.
    order = np.lexsort((np.arange(len(counts)), -counts, ~first, ~allowed))
    chosen = np.zeros_like(allowed)
    chosen[order[:size]] = True
    return chosen
