"""Attention of training-time test: step-0 keys of the past, and one own key a step (METHODS §2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    own_keys: Tensor | None,
    own_values: Tensor | None,
) -> Tensor:
    """Eager reference.

    Args:
        query: [B, R, heads, head_dim], rotated; one row per position that still carries loss.
        key, value: step-0 keys and values, [B, S, kv heads, head_dim].
        visible: bool [B, R, S], which step-0 keys a row sees (same document, not later).
        own_keys, own_values: the rows' own keys of steps 1..k, [B, R, k, kv heads, head_dim]; None
            at step 0.

    Returns:
        [B, R, heads, head_dim].
    """
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if own_keys is None or own_values is None:
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=visible[:, None], enable_gqa=True
        )
        return attended.transpose(1, 2)
    num_rows, num_steps = own_keys.shape[1:3]
    num_kv_heads, past = key.shape[1:3]
    # [B, kv heads, group · R, head_dim]: the heads of a group share their keys.
    grouped = query.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    scaled = grouped * query.shape[-1] ** -0.5
    scores = scaled.flatten(2, 3) @ key.transpose(-1, -2)
    scores = scores.unflatten(2, (-1, num_rows)).masked_fill(~visible[:, None, None], float("-inf"))
    own = torch.einsum("bngrd,brknd->bngrk", scaled, own_keys)
    weights = torch.cat([scores, own], -1).float().softmax(-1).to(value.dtype)
    past_weights, own_weights = weights.split([past, num_steps], -1)
    attended = (past_weights.flatten(2, 3) @ value).unflatten(2, (-1, num_rows))
    attended = attended + torch.einsum("bngrk,brknd->bngrd", own_weights, own_values)
    return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
