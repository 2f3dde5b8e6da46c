"""Attention of training-time test: step-0 keys of the past, and one own key a step (methods §2).

Step k of an unroll runs the rows that still carry loss. A row attends to the step-0 keys of its
document up to its own slot, and to the keys that it made itself in steps 1..k. The own keys stay
where their steps left them, with the rows of those steps; `OwnKeys` says which rows they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class OwnKeys:
    """The keys and values that rows made in steps 1..k; none is copied as k grows.

    Attributes:
        keys, values: of each step j, [B, R_j, kv heads, head_dim].
        rows: int64 [k, B, R], where step j has each of the R rows: flat, b · R_j + r. Those of rows
            that see anything are different.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rows: Tensor

    @classmethod
    def extended(cls, own: OwnKeys | None, key: Tensor, value: Tensor, select: Tensor) -> OwnKeys:
        """`own`, for the rows that a step still runs, and with that step's keys.

        Args:
            own: of the step before; None if this is step 1.
            key, value: the step's, [B, R, kv heads, head_dim].
            select: int64 [B, R], which of the step before's rows they are.
        """
        rows = torch.arange(select.numel(), device=select.device).view(1, *select.shape)
        if own is None:
            return cls((key,), (value,), rows)
        kept = own.rows.gather(2, select.expand(len(own.keys), -1, -1))
        return cls((*own.keys, key), (*own.values, value), torch.cat([kept, rows]))


def document_starts(documents: Tensor) -> Tensor:
    """Slot at which the document of each slot begins, int64 [B, S]; S for padding.

    Args:
        documents: int64 [B, S]; neighbouring slots of one number are a document, −1 is padding.
    """
    slots = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = slots.where(begins, 0).cummax(1).values
    return starts.where(documents >= 0, documents.shape[1])


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    own: OwnKeys | None = None,
) -> Tensor:
    """Attention of rows to the step-0 keys j with starts ≤ j ≤ index, and to their own keys.

    A row whose start lies beyond its index is padding: it sees nothing, no own key either, yields
    zeros and gives no gradient. Right in any order of rows; fast where the rows that see something
    come first and their slots ascend.

    Args:
        query: [B, R, heads, head_dim], rotated. Query head h reads kv head h // (heads / kv heads).
        key, value: step-0 keys and values, [B, S, kv heads, head_dim], in the query's dtype.
        index: int64 [B, R], the slot of each row.
        starts: int64 [B, R], where the row's document begins: `document_starts` at `index`.
        own: the rows' own keys; None at step 0.

    Returns:
        [B, R, heads, head_dim], scaled by head_dim^−½, softmax in float32.

    Raises:
        ValueError: when the heads are no multiple of the kv heads, or dtypes differ.
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads cannot share {key.shape[2]} kv heads evenly"
        )
    made = () if own is None else (*own.keys, *own.values)
    dtypes = {t.dtype for t in (query, key, value, *made)}
    if len(dtypes) > 1:
        raise ValueError(f"expected queries, keys and values of one dtype, found {dtypes}")
    attend: Callable[..., Tensor] = ttt_attention_reference
    if query.is_cuda and query.dtype != torch.float64:
        from draftlab.kernels.ttt_attention_launch import ttt_attention_triton as attend
    return attend(query, key, value, index, starts, own)


def ttt_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    own: OwnKeys | None = None,
) -> Tensor:
    """`ttt_attention`, eager, with the mask that its definition says."""
    slots = torch.arange(key.shape[1], device=key.device)
    visible = (starts[:, :, None] <= slots) & (slots <= index[:, :, None])
    padding = starts > index
    # A softmax over nothing would be NaN, and so would its gradient: padding sees all, for nothing.
    visible = visible | padding[:, :, None]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if own is None:
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=visible[:, None], enable_gqa=True
        ).transpose(1, 2)
    else:
        attended = _attend_with_own(query, key, value, visible, own)
    return attended.masked_fill(padding[:, :, None, None], 0)


def _attend_with_own(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, own: OwnKeys
) -> Tensor:
    """Attention to keys [B, kv heads, S, head_dim] and own ones; visible: bool [B, R, S]."""
    own_keys, own_values = (
        torch.stack([made.flatten(0, 1)[at] for made, at in zip(each, own.rows, strict=True)], 2)
        for each in (own.keys, own.values)
    )
    num_rows, num_steps = own_keys.shape[1:3]
    num_kv_heads, past = key.shape[1:3]
    group = query.shape[2] // num_kv_heads
    # [B, kv heads, group · R, head_dim]: the heads of a group share their keys.
    grouped = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4)
    scaled = grouped * query.shape[-1] ** -0.5
    scores = scaled.flatten(2, 3) @ key.transpose(-1, -2)
    scores = scores.unflatten(2, (group, num_rows))
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    own_scores = torch.einsum("bngrd,brknd->bngrk", scaled, own_keys)
    # float32 at least: in float64, where tests take gradients, no less
    scores = torch.cat([scores, own_scores], -1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    past_weights, own_weights = weights.to(value.dtype).split([past, num_steps], -1)
    attended = (past_weights.flatten(2, 3) @ value).unflatten(2, (group, num_rows))
    attended = attended + torch.einsum("bngrk,brknd->bngrd", own_weights, own_values)
    return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
