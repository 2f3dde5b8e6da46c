"""Triton kernel of `parallel_layout.py`: every entry of the layout is written by one program.

A program takes a tile of one row's columns. Rows are a rectangle or flattened; the latter may have
any lengths, which only the device knows, so there are programs for the longest row that could be
and those behind a row's end return at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.dependent_launch import FUSED
from draftlab.kernels.parallel_layout import ParallelLayout, RaggedLayout, layout_size

_TILE = 256


@triton.jit
def layout_kernel(
    token_ids,  # [B, Q] shifted, or [T] unshifted
    next_token,  # [B]; flattened rows only
    dropped,  # accepted [B], or rejected [B]
    query_start_loc,  # [B + 1]; flattened rows only
    start,
    block_table,
    tokens,
    positions,
    slots,
    is_mask,
    sample_index,
    feature_index,
    out_start_loc,
    num_rows,
    width,
    table_width,
    block_size,
    limit,
    mask_token_id,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    RAGGED: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if RAGGED:
        source = tl.load(query_start_loc + row).to(tl.int64)
        width = tl.load(query_start_loc + row + 1).to(tl.int64) - source
        pairs = width - tl.load(dropped + row)
        out = source + row * (K - 1)
        base = out
    else:
        source = row * width
        pairs = tl.load(dropped + row) + 1
        out = row * (width + K - 1)
        base = 0
    first = tl.load(start + row)
    if tl.program_id(1) == 0:
        depth = tl.arange(0, K_PADDED)
        tl.store(sample_index + row * K + depth, base + pairs - 1 + depth, depth < K)
        if RAGGED:
            tl.store(out_start_loc + row, out)
            if row == num_rows - 1:
                tl.store(out_start_loc + num_rows, out + width + K - 1)

    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = column < width + K - 1
    position = first + column
    # A negative start is a row of padding: its limit is where it begins.
    end = tl.where(first >= 0, limit, first)
    real = inside & (column < pairs + K - 1) & (position < end)
    pair = real & (column < pairs)
    if RAGGED:
        token = tl.load(token_ids + source + column + 1, pair & (column < pairs - 1), other=0)
        token = tl.where(column == pairs - 1, tl.load(next_token + row), token)
        tl.store(feature_index + out + column, tl.where(pair, source + column, 0), inside)
    else:
        token = tl.load(token_ids + source + column, pair, other=0)
    token = tl.where(real, tl.where(pair, token, mask_token_id), 0)
    block = tl.load(block_table + row * table_width + position // block_size, real, other=0)
    block = block.to(tl.int64)
    slot = tl.where(real & (block > 0), block * block_size + position % block_size, -1)
    tl.store(tokens + out + column, token, inside)
    tl.store(positions + out + column, tl.where(real, position, -1), inside)
    tl.store(slots + out + column, slot, inside)
    tl.store(is_mask + out + column, real & (column >= pairs), inside)


def parallel_layout_triton(
    out_tokens: Tensor,
    accepted: Tensor,
    start: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
) -> ParallelLayout:
    """`parallel_layout` in one launch."""
    num_rows, width = out_tokens.shape
    columns = layout_size(width, 1, k)
    tokens, positions, slots = out_tokens.new_empty(3, num_rows, columns)
    layout = ParallelLayout(
        tokens,
        positions,
        slots,
        out_tokens.new_empty(num_rows, columns, dtype=torch.bool),
        out_tokens.new_empty(num_rows, k),
    )
    _launch(
        layout,
        out_tokens,
        accepted,
        accepted,
        accepted,
        start,
        block_table,
        layout.tokens,
        layout.tokens,
        num_rows,
        width,
        columns,
        block_size,
        max_length,
        mask_token_id,
        k,
        ragged=False,
    )
    return layout


def ragged_layout_triton(
    token_ids: Tensor,
    next_token: Tensor,
    query_start_loc: Tensor,
    rejected: Tensor,
    start: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
) -> RaggedLayout:
    """`ragged_layout` in one launch."""
    num_tokens, num_rows, device = len(token_ids), len(next_token), token_ids.device
    size = layout_size(num_tokens, num_rows, k)
    tokens, positions, slots, features = torch.empty(4, size, dtype=torch.int64, device=device)
    layout = RaggedLayout(
        tokens,
        positions,
        slots,
        torch.empty(size, dtype=torch.bool, device=device),
        torch.empty(num_rows, k, dtype=torch.int64, device=device),
        features,
        torch.empty(num_rows + 1, dtype=torch.int64, device=device),
    )
    _launch(
        layout,
        token_ids,
        next_token,
        rejected,
        query_start_loc,
        start,
        block_table,
        layout.feature_index,
        layout.query_start_loc,
        num_rows,
        0,
        layout_size(num_tokens, 1, k),
        block_size,
        max_length,
        mask_token_id,
        k,
        ragged=True,
    )
    return layout


def _launch(
    layout: ParallelLayout,
    token_ids: Tensor,
    next_token: Tensor,
    dropped: Tensor,
    query_start_loc: Tensor,
    start: Tensor,
    block_table: Tensor,
    feature_index: Tensor,
    out_start_loc: Tensor,
    num_rows: int,
    width: int,
    most_columns: int,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
    *,
    ragged: bool,
) -> None:
    """Fills `layout`; tensors that a rectangle has no use for are any."""
    table_width = block_table.shape[1]
    tile = min(_TILE, triton.next_power_of_2(most_columns))
    layout_kernel[(num_rows, triton.cdiv(most_columns, tile))](
        token_ids.contiguous(),
        next_token.contiguous(),
        dropped.contiguous(),
        query_start_loc.contiguous(),
        start.contiguous(),
        block_table.contiguous(),
        layout.tokens,
        layout.positions,
        layout.slots,
        layout.is_mask,
        layout.sample_index,
        feature_index,
        out_start_loc,
        num_rows,
        width,
        table_width,
        block_size,
        min(max_length, table_width * block_size),
        mask_token_id,
        K=k,
        K_PADDED=triton.next_power_of_2(k),
        RAGGED=ragged,
        TILE=tile,
        num_warps=1 if tile <= 64 else 4,
        **FUSED,
    )
