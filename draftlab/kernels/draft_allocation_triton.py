"""Triton kernels of `draft_allocation.py`; a program takes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.dependent_launch import launch_options
from draftlab.kernels.draft_allocation import LARGEST_LOGIT
from draftlab.kernels.step_types import CompactTokens

_ROWS_TILE = 64  # rows that a program compares its own with at once
_TOKENS_TILE = 256
_LARGEST = tl.constexpr(LARGEST_LOGIT)


@triton.jit
def _log_confidence(confidence, scale, bias):
    """Return log σ(scale · confidence + bias), 0 or less."""
    x = confidence * scale + bias
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST), -_LARGEST)
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _available(length, stored, slot, mask, max_length, K: tl.constexpr):
    """Return `step_layout.available_drafts` of slots."""
    known = tl.load(length + slot, mask=mask, other=0)
    room = tl.minimum(max_length - 1 - known, tl.load(stored + slot, mask=mask, other=0))
    return tl.where(known > 0, tl.minimum(tl.maximum(room, 0), K), 0)


@triton.jit
def allocate_kernel(
    index, length, stored, confidence, stride, scale, bias, num_drafts, num_rows, budget,
    max_length, K: tl.constexpr, DEPTHS: tl.constexpr, TILE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Count one row's drafts of rank below the budget; grid (B,)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(index + row)
    available = _available(length, stored, slot, slot >= 0, max_length, K)
    depth = tl.arange(0, DEPTHS)
    own = tl.zeros([DEPTHS], tl.float32)
    total = tl.sum(own, 0)
    for d in range(K):
        x = tl.load(confidence + slot * stride + d)
        total += _log_confidence(x, tl.load(scale + d), tl.load(bias + d))
        own = tl.where(depth == d, total, own)
    rank = tl.zeros([DEPTHS], tl.int32)
    for start in range(0, num_rows, TILE):
        other = start + tl.arange(0, TILE)
        inside = other < num_rows
        other_slot = tl.load(index + other, mask=inside, other=0)
        count = tl.where(inside, _available(length, stored, other_slot, inside, max_length, K), 0)
        survival = tl.zeros([TILE], tl.float32)
        for d in range(K):
            x = tl.load(confidence + other_slot * stride + d, mask=inside, other=0.0)
            survival += _log_confidence(x, tl.load(scale + d), tl.load(bias + d))
            closer = (d < depth)[:, None] | ((depth == d)[:, None] & (other < row)[None, :])
            first = survival[None, :] > own[:, None]
            first |= (survival[None, :] == own[:, None]) & closer
            rank += tl.sum((first & (d < count)[None, :]).to(tl.int32), 1)
    chosen = (depth < available) & (rank < budget)
    tl.store(num_drafts + row, tl.sum(chosen.to(tl.int64), 0))


@triton.jit
def compact_kernel(
    length, num_drafts, tokens, positions, slots, tokens_out, positions_out, slots_out, start_out,
    num_rows, num_tokens, WIDTH: tl.constexpr, DEPTHS: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Copy one row's tokens; the last program fills what is left; grid (B + 1,)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    other = tl.arange(0, ROWS)
    inside = other < num_rows
    active = tl.load(length + other, mask=inside, other=0) > 0
    count = tl.where(active, tl.load(num_drafts + other, mask=inside, other=0) + 1, 0)
    start = tl.sum(tl.where(other < row, count, 0), 0)
    if row < num_rows:
        tl.store(start_out + row, start)
        depth = tl.arange(0, DEPTHS)
        real = depth < tl.sum(tl.where(other == row, count, 0), 0)
        at = row.to(tl.int64) * WIDTH + depth
        tl.store(tokens_out + start + depth, tl.load(tokens + at, mask=real), mask=real)
        tl.store(positions_out + start + depth, tl.load(positions + at, mask=real), mask=real)
        tl.store(slots_out + start + depth, tl.load(slots + at, mask=real), mask=real)
    else:
        for first in range(0, num_tokens, TILE):
            at = first + tl.arange(0, TILE)
            rest = (at >= start) & (at < num_tokens)
            tl.store(tokens_out + at, tl.zeros([TILE], tl.int64), mask=rest)
            tl.store(positions_out + at, tl.zeros([TILE], tl.int64) - 1, mask=rest)
            tl.store(slots_out + at, tl.zeros([TILE], tl.int64) - 1, mask=rest)


def allocate_drafts(slots, index, scale, bias, *, budget, max_length, k) -> Tensor:
    """Launch `draft_allocation.allocate_drafts`."""
    num_drafts = torch.zeros_like(index)
    if k == 0:
        return num_drafts
    with torch.cuda.device_of(index):
        allocate_kernel[(len(index),)](
            index,
            slots.length,
            slots.stored,
            slots.confidence,
            slots.confidence.stride(0),
            scale,
            bias,
            num_drafts,
            len(index),
            budget,
            max_length,
            K=k,
            DEPTHS=triton.next_power_of_2(k),
            TILE=_ROWS_TILE,
            num_warps=4,
            **launch_options(index.device),
        )
    return num_drafts


def compact_tokens(layout, num_tokens) -> CompactTokens:
    """Launch `draft_allocation.compact_tokens`."""
    rows, width = layout.tokens.shape
    outputs = *layout.tokens.new_empty(3, num_tokens), layout.tokens.new_empty(rows)
    with torch.cuda.device_of(layout.tokens):
        compact_kernel[(rows + 1,)](
            layout.length,
            layout.num_drafts,
            layout.tokens,
            layout.positions,
            layout.slots,
            *outputs,
            rows,
            num_tokens,
            WIDTH=width,
            DEPTHS=triton.next_power_of_2(width),
            ROWS=triton.next_power_of_2(rows),
            TILE=_TOKENS_TILE,
            num_warps=4,
            **launch_options(layout.tokens.device),
        )
    return CompactTokens(*outputs)
