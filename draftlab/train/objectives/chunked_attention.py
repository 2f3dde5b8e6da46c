"""Attention of training-time test in layers that see one chunk of positions at a time (Llama 4).

A row at slot t, step k, is at position t + k and sees positions from ⌊(t + k) / chunk⌋ · chunk on.
While that is t or before it, its document merely begins later. Once an unroll has crossed into a
chunk of its own, no step-0 key is left, and of the row's own keys those behind the border.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.ttt_attention import ttt_attention
from draftlab.kernels.ttt_attention_types import StepKeyValues


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    own: StepKeyValues | None,
    *,
    positions: Tensor,
    chunk: int | None,
) -> Tensor:
    """`ttt_attention`, in which rows see no further back than their chunk.

    Args: those of `ttt_attention`, and
        positions: int64 [B, R], of each row: in its document, the steps it has made included.
        chunk: None: `ttt_attention` as it is.
    """
    steps = 0 if own is None else len(own.keys)
    # No position reaches a second chunk: known from shapes, so the device is not asked.
    if chunk is None or key.shape[1] + steps <= chunk:
        return ttt_attention(query, key, value, index, starts, own)
    into = positions % chunk
    since = torch.maximum(starts, index + steps - into)
    attended = ttt_attention(query, key, value, index, since, own)
    if own is None:
        return attended
    crossed = (since > index) & (starts <= index)
    return torch.where(crossed[..., None, None], _own_alone(query, own, into), attended)


def _own_alone(query: Tensor, own: StepKeyValues, into: Tensor) -> Tensor:
    """Attention to a row's own keys alone, the last `into` + 1 of them: [B, R, heads, head_dim]."""
    keys, values = (
        torch.stack([made.flatten(0, 1)[at] for made, at in zip(each, own.rows, strict=True)], 2)
        for each in (own.keys, own.values)
    )
    num_steps, num_kv_heads = keys.shape[2:4]
    grouped = query.unflatten(2, (num_kv_heads, -1)) * query.shape[-1] ** -0.5
    scores = torch.einsum("brngd,brknd->brngk", grouped, keys)
    ago = torch.arange(num_steps - 1, -1, -1, device=query.device)
    hidden = ago > into[..., None]
    scores = scores.masked_fill(hidden[:, :, None, None], float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(wide).softmax(-1).to(values.dtype)
    return torch.einsum("brngk,brknd->brngd", weights, values).flatten(2, 3)
