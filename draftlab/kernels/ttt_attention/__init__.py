"""Attention of EAGLE-3's training-time test (Li et al., arXiv:2503.01840; docs/methods.md §2).

Step k of an unroll runs the rows that still have a loss. A row attends to the step-0 keys of its
document up to its own slot, and to the keys that it computed itself in steps 1..k. The latter stay
where their steps computed them; `StepKeyValues` holds the rows' indices there.

The kernels are in `ttt_attention/triton.py`. Tests:
tests/kernels/test_training_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.paged_attention.plan import check_heads

MOST_SCORES = 2**26
"""Scores of a batch row that the reference computes at once and keeps for the backward pass. Longer
rows are taken in parts, which the backward pass computes again."""


@dataclass(frozen=True)
class StepKeyValues:
    """The keys and values that rows computed in steps 1..k; none is copied as k grows.

    Attributes:
        keys, values: of each step j, [B, R_j, kv heads, head_dim].
        rows: int64 [k, B, R], the row of step j that each of the R rows is: flat, b · R_j + r. No
            two rows that see anything share one.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rows: Tensor

    @classmethod
    def extend(
        cls, previous: StepKeyValues | None, key: Tensor, value: Tensor, select: Tensor
    ) -> StepKeyValues:
        """Return `previous` for the rows that a step still runs, with that step's keys added.

        Args:
            previous: of the step before; None if this is step 1.
            key, value: the step's, [B, R, kv heads, head_dim].
            select: int64 [B, R], the indices of these rows among the previous step's rows.
        """
        newest = torch.arange(select.numel(), device=select.device).view(1, *select.shape)
        if previous is None:
            return cls((key,), (value,), newest)
        rows = previous.rows.gather(2, select.expand(len(previous.rows), -1, -1))
        keys, values = (*previous.keys, key), (*previous.values, value)
        return cls(keys, values, torch.cat([rows, newest]))


def check_inputs(query: Tensor, key: Tensor, *others: Tensor) -> None:
    """Raise ValueError if the heads are no multiple of the kv heads, or dtypes differ."""
    check_heads(query, key)
    dtypes = {t.dtype for t in (query, key, *others)}
    if len(dtypes) > 1:
        raise ValueError(f"expected queries, keys and values of one dtype, found {dtypes}")


def document_starts(documents: Tensor) -> Tensor:
    """Return the slot at which the document of each slot begins, int64 [B, S]; S for padding.

    Args:
        documents: int64 [B, S]; neighbouring slots of one number are a document, −1 is padding.
    """
    slots = torch.arange(documents.shape[1], device=documents.device)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = slots.where(begins, 0).cummax(1).values
    return starts.where(documents >= 0, documents.shape[1])


@triton_operator("ttt_attention.launch")
def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    steps: StepKeyValues | None = None,
) -> Tensor:
    """Return attention of rows to step-0 keys j with starts ≤ j ≤ index, and to their step keys.

    A row whose start lies beyond its index is padding: it sees nothing, no step key either, yields
    zeros and has no gradient. The result is correct in any order of rows; it is fast where the rows
    that see something come first and their slots ascend.

    Args:
        query: [B, R, heads, head_dim], rotated. Query head h reads kv head h // (heads / kv heads).
        key, value: step-0 keys and values, [B, S, kv heads, head_dim], in the query's dtype.
        index: int64 [B, R], the slot of each row.
        starts: int64 [B, R], where the row's document begins: `document_starts` at `index`.
        steps: the keys that the rows computed in steps 1..k; None at step 0.

    Returns:
        [B, R, heads, head_dim], scaled by head_dim^−½, softmax in float32.

    Raises:
        ValueError: if the heads are no multiple of the kv heads, or dtypes differ.
    """
    check_inputs(query, key, value, *(() if steps is None else (*steps.keys, *steps.values)))
    own = None
    if steps is not None:
        own = tuple(
            torch.stack([t.flatten(0, 1)[at] for t, at in zip(tensors, steps.rows, strict=True)], 2)
            for tensors in (steps.keys, steps.values)
        )
    return attend_eagerly(query, key, value, index, starts, own)


def attend_eagerly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    own: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return `ttt_attention` of rows whose own k keys and values are [B, R, k, kv heads, head_dim].

    Args:
        own: None for no such keys. Others: as in `ttt_attention`.
    """
    part = max(1, MOST_SCORES // max(1, query.shape[2] * key.shape[1]))
    if query.shape[1] <= part:
        return _attend(query, key, value, index, starts, own)
    attended = []
    for rows in (slice(at, at + part) for at in range(0, query.shape[1], part)):
        first, last = starts[:, rows], index[:, rows]
        seen = first <= last
        low = int(first.where(seen, key.shape[1] - 1).min())
        keys = slice(low, int(last.where(seen, low).max()) + 1)
        args = query[:, rows], key[:, keys], value[:, keys], last - low, first - low
        theirs = None if own is None else (own[0][:, rows], own[1][:, rows])
        options = {"use_reentrant": False, "preserve_rng_state": False}
        attended.append(checkpoint(_attend, *args, theirs, **options))
    return torch.cat(attended, 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    own: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Return `attend_eagerly` with all scores in memory at once."""
    slots = torch.arange(key.shape[1], device=key.device)
    visible = (starts[:, :, None] <= slots) & (slots <= index[:, :, None])
    padding = starts > index
    # A softmax over nothing would be NaN, and so would its gradient: padding sees all keys instead.
    visible = visible | padding[:, :, None]
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    if own is None:
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key, value, attn_mask=visible[:, None], enable_gqa=True
        ).transpose(1, 2)
    else:
        attended = _attend_with_own_keys(query, key, value, visible, *own)
    return attended.masked_fill(padding[:, :, None, None], 0)


def _attend_with_own_keys(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, own_key: Tensor, own_value: Tensor
) -> Tensor:
    """Return attention to keys [B, kv heads, S, head_dim] and own keys; visible is [B, R, S]."""
    num_rows, num_own = own_key.shape[1:3]
    num_kv_heads, past = key.shape[1:3]
    group = query.shape[2] // num_kv_heads
    # [B, kv heads, group · R, head_dim]: the heads of a group share their keys.
    grouped = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4)
    scaled = grouped * query.shape[-1] ** -0.5
    scores = scaled.flatten(2, 3) @ key.transpose(-1, -2)
    scores = scores.unflatten(2, (group, num_rows))
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    own_scores = torch.einsum("bngrd,brknd->bngrk", scaled, own_key)
    # At least float32; in float64, where tests take gradients, no less.
    scores = torch.cat([scores, own_scores], -1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
    past_weights, own_weights = weights.to(value.dtype).split([past, num_own], -1)
    attended = (past_weights.flatten(2, 3) @ value).unflatten(2, (group, num_rows))
    attended = attended + torch.einsum("bngrk,brknd->bngrd", own_weights, own_value)
    return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)
