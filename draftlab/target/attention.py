"""How decoding plugs into any transformers model: rows of cached keys, masked by true positions.

transformers builds its masks from a cache length, which is one number for a whole batch. In
speculative decoding every row has its own length, so a forward pass states the position of each of
its tokens here, and the model's own mask functions (causal, sliding window, chunked) are evaluated
on those positions. Keys live at the cache slot of their position, so a key is visible iff the mask
function says so; stale keys of rejected drafts sit at later positions and are never seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

ATTENTION = "draftlab"
_positions: ContextVar[Tensor | None] = ContextVar("positions", default=None)


@contextmanager
def step_positions(positions: Tensor) -> Iterator[None]:
    """Makes `positions` [B, M] those of the next forward pass inside the block."""
    token = _positions.set(positions)
    try:
        yield
    finally:
        _positions.reset(token)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device,
    **options: Any,
) -> Tensor | None:
    """Boolean mask [B, 1, M, S], True where a query sees a key."""
    positions = _positions.get()
    if positions is None:
        return sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            device=device,
            **options,
        )
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.long, device=device)[:, None, None, None]
    keys = torch.arange(kv_length, device=device)[None, None, None, :]
    return mask_function(rows, heads, positions[:, None, :, None], keys)


AttentionInterface.register(ATTENTION, sdpa_attention_forward)
AttentionMaskInterface.register(ATTENTION, _mask)
