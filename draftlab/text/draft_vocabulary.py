"""The draft vocabulary: the tokens a head can draft (methods §1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.store import Store, predicted


@dataclass(frozen=True)
class DraftVocabulary:
    """Which target tokens a head can draft.

    Attributes:
        target_ids: int64 [D], ascending; draft id i is target id target_ids[i].
        coverage: share of the store's predicted tokens (occurrences, not kinds) that are inside.
    """

    target_ids: Tensor
    coverage: float

    @property
    def d2t(self) -> Tensor:
        """int64 [D] offsets: target id = i + d2t[i]."""
        return self.target_ids - torch.arange(len(self.target_ids))

    def t2d(self, vocab_size: int) -> Tensor:
        """bool [V]: which target ids are inside."""
        inside = torch.zeros(vocab_size, dtype=torch.bool)
        inside[self.target_ids] = True
        return inside


def build_draft_vocabulary(
    store: Store,
    size: int | None,
    always: Iterable[int],
    never: Iterable[int],
    vocab_size: int,
) -> DraftVocabulary:
    """Chooses the most frequent predicted tokens of a store, ties by lowest id.

    Args:
        store: whose tokens are counted, by `predicted`: those a head is asked for while serving.
        size: D; None or ≥ V: every id that is not in `never`.
        always: stop ids and special tokens; those that occur among the predicted tokens are in,
            however rare. (Llama 3 alone has 250 special tokens that never occur.)
        never: the mask token.
        vocab_size: V of the target.

    Returns:
        D ids, filled up with the lowest unused ones where fewer kinds occur.

    Raises:
        UserError: size below the number of `always` tokens that occur, or not to be reached.
        ValueError: ids outside the vocabulary.
    """
    forced, banned = set(always), set(never)
    if any(not 0 <= i < vocab_size for i in forced | banned):
        raise ValueError(f"expected ids in 0..{vocab_size - 1}, found {sorted(forced | banned)}")
    counts = predicted_counts(store, vocab_size)
    allowed = np.ones(vocab_size, dtype=bool)
    allowed[list(banned)] = False
    wanted = vocab_size if size is None else size
    chosen = allowed if wanted >= vocab_size else _choose(counts, allowed, forced, wanted)
    total = counts.sum()
    coverage = float(counts[chosen].sum() / total) if total else 0.0
    return DraftVocabulary(torch.from_numpy(np.flatnonzero(chosen)), coverage)


def predicted_counts(store: Store, vocab_size: int) -> np.ndarray:
    """How often each token of the target's vocabulary is predicted in a store, int64 [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(store)):
        tokens, spans = store.tokens_and_spans(index)
        counts += np.bincount(tokens[predicted(spans)].numpy(), minlength=vocab_size)
    return counts


def _choose(counts: np.ndarray, allowed: np.ndarray, forced: set[int], size: int) -> np.ndarray:
    """bool [V] with `size` members."""
    first = np.zeros_like(allowed)
    first[[i for i in forced if counts[i] > 0]] = True
    first &= allowed
    if first.sum() > size:
        raise UserError(
            f"expected a draft vocabulary of at least {first.sum()}, the stop ids and special "
            f"tokens that occur in answers; found {size}",
            do="raise draft_vocab.size",
        )
    if allowed.sum() < size:
        raise UserError(f"a draft vocabulary of {size} leaves no room for the mask token")
    ids = np.arange(len(counts))
    # Last key first: banned at the end, forced at the front, then frequent, then low. Tokens that
    # never occur have count 0, so the lowest unused ids follow by themselves.
    order = np.lexsort((ids, -counts, ~first, ~allowed))
    chosen = np.zeros_like(allowed)
    chosen[order[:size]] = True
    return chosen
