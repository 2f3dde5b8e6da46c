"""Mistakes of block heads that a comparison with another program must notice."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from draftlab.heads.block import BlockHead
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives import block

Mistake = tuple[str, BlockHead, Batch, AbstractContextManager[Any]]
"""Its name, a head and a batch to compute with, and the context to do it in."""


def mistakes(head: BlockHead, batch: Batch) -> Iterator[Mistake]:
    """Yield mistakes of masks, flags, tokens and features; head and batch stay as they are."""

    def with_config(**changes: Any) -> BlockHead:
        wrong = copy.deepcopy(head)
        wrong.config = head.config.model_copy(update=changes)
        wrong.mask_token_id = wrong.config.mask_token_id
        return wrong

    def attention(first: int, last: int) -> AbstractContextManager[Any]:
        """Attention to context from `first` positions later, up to `last` positions later."""
        right = block.ttt_attention

        def wrong(query: Any, key: Any, value: Any, index: Any, starts: Any, own: Any) -> Any:
            shifted = (starts + first).clamp(min=0).where(starts <= index, starts)
            last_seen = (index + last).clamp(max=key.shape[1] - 1).where(starts <= index, index)
            return right(query, key, value, last_seen, shifted, own)

        return patch.object(block, "ttt_attention", wrong)

    same = nullcontext()
    config, features = head.config, batch.features
    yield "causal flipped", with_config(is_causal=not config.is_causal), batch, same
    # As many drafts, so one slot more or less.
    flipped = with_config(sample_from_anchor=not config.sample_from_anchor)
    yield "sample_from_anchor flipped", flipped, batch, same
    other = (config.mask_token_id + 1) % config.vocab_size
    yield "the next token as mask", with_config(mask_token_id=other), batch, same
    yield "context with the anchor", head, batch, attention(0, 1)
    yield "context without the position before the anchor", head, batch, attention(0, -1)
    yield "context of the conversation before", head, batch, attention(-3, 0)
    rolled = features.roll(config.target_hidden_size, -1)
    yield "boundaries in another order", head, replace(batch, features=rolled), same
    late = replace(batch, features=features.roll(1, 1))
    yield "features one position late", head, late, same
    yield "positions one later at slots", _shifted_slots(head), batch, same
    if head.markov_head is not None:
        unbiased = copy.deepcopy(head)
        torch.nn.init.zeros_(unbiased.markov_head.markov_w2.weight)
        yield "no Markov bias", unbiased, batch, same


def _shifted_slots(head: BlockHead) -> BlockHead:
    """Return a head that rotates slots as if they were one position later."""
    wrong = copy.deepcopy(head)
    right = wrong.rope.angles
    wrong.rope.angles = lambda positions: right(positions + (positions.ndim == 3))
    return wrong
