"""Which drafts of a batch are verified, where there are more than a budget allows.

With c_j the calibrated confidence of draft j, a draft is reached and accepted with probability
c_1 · … · c_k, its survival. The `budget` drafts of the largest survival are verified, whichever
rows they belong to. A row's survivals never increase, so its chosen drafts come first.

The choice keeps the output's distribution (docs/methods.md §5.7): survival depends on the tokens
before a draft alone, and drafts behind it are never preferred to it. Tests:
tests/kernels/test_draft_allocation.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.step_layout import available_drafts
from draftlab.kernels.step_types import CompactTokens, SlotBuffers, StepLayout

LARGEST_LOGIT = 1e30
"""Bound of calibrated logits, whose sums stay finite; NaN becomes the least one."""


def _slots_on_cuda(slots: SlotBuffers, *_: Any, **__: Any) -> bool:
    return slots.length.is_cuda


def _layout_on_cuda(layout: StepLayout, *_: Any, **__: Any) -> bool:
    return layout.tokens.is_cuda


@triton_operator("draft_allocation_triton", when=_slots_on_cuda)
def allocate_drafts(
    slots: SlotBuffers,
    index: Tensor,
    scale: Tensor,
    bias: Tensor,
    *,
    budget: int,
    max_length: int,
    k: int,
) -> Tensor:
    """Return how many drafts of each row are verified, int64 [B]; `budget` or fewer in all.

    Of drafts with equal survival, those closer to their row's newest token come first, then those
    of earlier rows.

    Args:
        slots: with `confidence`; not changed.
        index: int64 [B], slot numbers.
        scale, bias: float32 [≥ k], of the calibrated logits scale · confidence + bias by depth.
        budget: drafts to verify in the whole batch.
        max_length: positions a row may take.
        k: most drafts of a row.
    """
    available = available_drafts(slots, index, max_length=max_length, k=k)
    if k == 0:
        return available
    x = slots.confidence[index, :k] * scale[:k] + bias[:k]
    x = x.nan_to_num(nan=-LARGEST_LOGIT).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    log_confidence = x.clamp(max=0) - torch.log(1 + torch.exp(-x.abs()))
    log_survival, total = [], torch.zeros_like(x[:, 0])
    for depth in range(k):  # one after the other, so that rounding never makes a sum larger
        total = total + log_confidence[:, depth]
        log_survival.append(total.where(depth < available, -torch.inf))
    order = torch.stack(log_survival).flatten().sort(descending=True, stable=True).indices
    chosen = torch.zeros_like(order, dtype=torch.bool)
    chosen[order[:budget]] = True
    return torch.minimum(chosen.view(k, -1).sum(0), available)


@triton_operator("draft_allocation_triton", when=_layout_on_cuda)
def compact_tokens(layout: StepLayout, num_tokens: int) -> CompactTokens:
    """Return a step's tokens without the drafts that are not verified.

    Args:
        num_tokens: N; at least the rows' newest tokens and their verified drafts together.
    """
    active = layout.length > 0
    counts = (layout.num_drafts + 1).where(active, 0)
    query_start = counts.cumsum(0) - counts
    depth = torch.arange(layout.tokens.shape[1], device=counts.device)
    real = depth < counts[:, None]
    at = (query_start[:, None] + depth)[real]
    compact = []
    for values, fill in ((layout.tokens, 0), (layout.positions, -1), (layout.slots, -1)):
        compact.append(values.new_full((num_tokens,), fill).index_copy_(0, at, values[real]))
    return CompactTokens(*compact, query_start)


def row_index(query_start: Tensor, width: int, num_tokens: int) -> Tensor:
    """Return each row's indices among compact tokens, int64 [B, width].

    Columns behind a row's last token hold other rows' indices.
    """
    depth = torch.arange(width, device=query_start.device)
    return (query_start[:, None] + depth).clamp(max=num_tokens - 1)
