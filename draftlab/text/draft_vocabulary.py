"""The draft vocabulary: which tokens of the target's vocabulary a head can draft (methods §1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.sample_table import prediction_mask
from draftlab.store.store import Store


@dataclass(frozen=True)
class DraftVocabulary:
    """The target tokens that a head can draft.

    Attributes:
        target_ids: int64 [D], ascending; draft id i is target id target_ids[i].
        coverage: the share of held-out records' predicted tokens (counting repeats) that it
            contains; None: no records are held out.
        held_out: number of these tokens.
    """

    target_ids: Tensor
    coverage: float | None
    held_out: int = 0

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
    *,
    training: Sequence[int] | np.ndarray | None = None,
    held_out: Sequence[int] | np.ndarray = (),
) -> DraftVocabulary:
    """Choose the most frequent predicted tokens of training records; the lowest id wins a tie.

    If fewer than D different tokens occur, the most frequent other tokens of these records, which
    are those of prompts, fill the vocabulary, and then the lowest ids: a tokenizer numbers its
    tokens about as it learnt them, the frequent ones first.

    Args:
        store: the data set whose `prediction_mask` tokens are counted.
        size: D; None or ≥ V: all ids except `excluded`.
        required: stop ids and special tokens; those that occur among the predicted tokens are
            always chosen. (Llama 3 alone has 250 special tokens that never occur.)
        excluded: ids that are never chosen, such as the mask token.
        vocab_size: V of the target.
        training: indices of the records that are counted; None: all.
        held_out: indices of the records whose predicted tokens the coverage is about.

    Raises:
        UserError: size is below the number of required tokens that occur, or not reachable.
    """
    chosen = np.ones(vocab_size, dtype=bool)
    chosen[list(excluded)] = False
    if size is not None and size < vocab_size:
        indices = range(len(store)) if training is None else training
        counts = predicted_counts(store, vocab_size, indices)
        chosen = _choose(*counts, chosen, required, size)
    unseen = predicted_counts(store, vocab_size, held_out)[0]
    total = int(unseen.sum())
    coverage = float(unseen[chosen].sum() / total) if total else None
    return DraftVocabulary(torch.from_numpy(np.flatnonzero(chosen)), coverage, total)


def predicted_counts(
    store: Store, vocab_size: int, indices: Iterable[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of some records of a store.

    Returns:
        How often each target token is a `prediction_mask` token, and how often another, int64 [V].
    """
    counts = np.zeros((2, vocab_size), dtype=np.int64)
    remaining = iter(indices)
    while some := list(islice(remaining, 1024)):  # each count takes as long as V additions
        tokens, spans = zip(*(store.tokens_and_spans(int(index)) for index in some), strict=True)
        joined, mask = torch.cat(tokens), prediction_mask(torch.cat(spans))
        starts = np.cumsum([0, *map(len, tokens[:-1])])
        mask[starts] = False  # a record's first two tokens are never labels
        mask[(starts + 1).clip(max=len(mask) - 1)] = False
        for row, of_kind in zip(counts, (mask, ~mask), strict=True):
            row += np.bincount(joined[of_kind].numpy(), minlength=vocab_size)
    return counts[0], counts[1]


def _choose(
    counts: np.ndarray, others: np.ndarray, allowed: np.ndarray, required: Iterable[int], size: int
) -> np.ndarray:
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
    # Tokens that are never predicted follow: those of prompts, then unused ones.
    of_prompts = np.where(counts > 0, 0, others)
    order = np.lexsort((np.arange(len(counts)), -of_prompts, -counts, ~first, ~allowed))
    chosen = np.zeros_like(allowed)
    chosen[order[:size]] = True
    return chosen
