"""The draft vocabulary: which tokens of the target's vocabulary a head can draft (methods §1)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    order: np.ndarray | None = None,
) -> DraftVocabulary:
    """Choose the most frequent predicted tokens of training records; the lowest id wins a tie.

    If fewer than D different tokens occur, the most frequent other tokens of these records, which
    are those of prompts, fill the vocabulary, and then tokens in `order`.

    Args:
        store: the data set whose `prediction_mask` tokens are counted.
        size: D; None or ≥ V: all ids except `excluded`.
        required: stop ids and special tokens; those that occur among the predicted tokens are
            always chosen. (Llama 3 alone has 250 special tokens that never occur.)
        excluded: ids that are never chosen, such as the mask token.
        vocab_size: V of the target.
        training: indices of the records that are counted; None: all.
        held_out: indices of the records whose predicted tokens the coverage is about.
        order: int64 [V], of tokens that do not occur the lowest numbers are chosen first; None:
            by id.

    Raises:
        UserError: size is below the number of required tokens that occur, or not reachable.
        ValueError: ids outside the vocabulary.
    """
    required, excluded = set(required), set(excluded)
    if any(not 0 <= i < vocab_size for i in required | excluded):
        raise ValueError(
            f"expected ids in 0..{vocab_size - 1}, found {sorted(required | excluded)}"
        )
    chosen = np.ones(vocab_size, dtype=bool)
    chosen[list(excluded)] = False
    if size is not None and size < vocab_size:
        indices = range(len(store)) if training is None else training
        counts = predicted_counts(store, vocab_size, indices)
        unused = np.zeros(vocab_size, np.int64) if order is None else order
        chosen = _choose(*counts, unused, chosen, required, size)
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
    for index in indices:
        tokens, spans = store.tokens_and_spans(int(index))
        mask = prediction_mask(spans)
        for row, of_kind in zip(counts, (mask, ~mask), strict=True):
            row += np.bincount(tokens[of_kind].numpy(), minlength=vocab_size)
    return counts[0], counts[1]


def merge_order(tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Return the place of each token in the order in which a tokenizer has learnt its tokens.

    A BPE tokenizer merges the most frequent pair first; a unigram tokenizer has a score for each
    token. All other tokens, such as special ones and single bytes, come last.

    Returns:
        int64 [V], equal numbers for those that come last; all equal for tokenizers of other kinds.
    """
    order = np.full(vocab_size, vocab_size, dtype=np.int64)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    if model.get("type") == "BPE":
        pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
        ids = [model["vocab"].get("".join(pair), vocab_size) for pair in pairs]
    elif model.get("type") == "Unigram":
        ids = np.argsort([-score for _, score in model["vocab"]], kind="stable").tolist()
    else:
        ids = []
    for place, token in reversed([*enumerate(ids)]):  # a token that two merges make: the first
        if token < vocab_size:
            order[token] = place
    return order


def _choose(
    counts: np.ndarray,
    others: np.ndarray,
    unused: np.ndarray,
    allowed: np.ndarray,
    required: set[int],
    size: int,
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
    unused = np.where(counts + others > 0, 0, unused)
    order = np.lexsort((np.arange(len(counts)), unused, -of_prompts, -counts, ~first, ~allowed))
    chosen = np.zeros_like(allowed)
    chosen[order[:size]] = True
    return chosen
