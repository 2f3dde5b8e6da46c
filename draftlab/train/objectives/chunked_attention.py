"""Attention of training-time test in layers with chunked attention (Llama 4).

The row at slot t in step k has position t + k. It attends to positions from
⌊(t + k) / chunk⌋ · chunk on. If this first position is at most t, the effect is that of a later
document start. Otherwise the unroll has crossed a chunk boundary: the row attends to no step-0 key,
and only to its step keys after the boundary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.ttt_attention import ttt_attention
from draftlab.kernels.ttt_attention.types import StepKeyValues


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    step_keys: StepKeyValues | None,
    *,
    positions: Tensor,
    chunk: int | None,
) -> Tensor:
    """Return `ttt_attention` in which rows attend only to positions of their chunk.

    Args: those of `ttt_attention`, and
        positions: int64 [B, R], position of each row in its document, steps included.
        chunk: positions of a chunk; None: plain `ttt_attention`.
    """
    steps = 0 if step_keys is None else len(step_keys.keys)
    # The shapes show that no position reaches a second chunk, without waiting for the device.
    if chunk is None or key.shape[1] + steps <= chunk:
        return ttt_attention(query, key, value, index, starts, step_keys)
    offset = positions % chunk
    first = torch.maximum(starts, index + steps - offset)
    attended = ttt_attention(query, key, value, index, first, step_keys)
    if step_keys is None:
        return attended
    crossed = (first > index) & (starts <= index)
    return torch.where(
        crossed[..., None, None], _step_key_attention(query, step_keys, offset), attended
    )


def _step_key_attention(query: Tensor, step_keys: StepKeyValues, offset: Tensor) -> Tensor:
    """Return attention [B, R, heads, head_dim] to the last `offset` + 1 step keys of each row."""
    keys, values = (
        torch.stack([x.flatten(0, 1)[i] for x, i in zip(tensors, step_keys.rows, strict=True)], 2)
        for tensors in (step_keys.keys, step_keys.values)
    )
    num_steps, num_kv_heads = keys.shape[2:4]
    grouped = query.unflatten(2, (num_kv_heads, -1)) * query.shape[-1] ** -0.5
    scores = torch.einsum("brngd,brknd->brngk", grouped, keys)
    distance = torch.arange(num_steps - 1, -1, -1, device=query.device)
    mask = distance > offset[..., None]
    scores = scores.masked_fill(mask[:, :, None, None], float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(wide).softmax(-1).to(values.dtype)
    return torch.einsum("brngk,brknd->brngd", weights, values).flatten(2, 3)
