"""Triton kernel of `parallel_layout/`: a program writes a tile of one row's columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftlab.kernels.launching import FP_FUSION
from draftlab.kernels.step_layout.triton import slot_of
from draftlab.kernels.step_layout.types import ParallelLayout

_TILE = 256


@triton.jit
def layout_kernel(
    out_tokens, accepted, start, block_table, tokens, positions, slots, is_mask, sample_index,
    width, table_width, block_size, limit, mask_token_id,
    K: tl.constexpr, K_PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lay out one tile of a row; grid (B, tiles of width + K − 1). limit: positions a row has."""
    row = tl.program_id(0).to(tl.int64)
    num_pairs = tl.load(accepted + row) + 1
    out = row * (width + K - 1)
    first = tl.load(start + row)
    if tl.program_id(1) == 0:
        depth = tl.arange(0, K_PADDED)
        tl.store(sample_index + row * K + depth, num_pairs - 1 + depth, depth < K)

    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = column < width + K - 1
    position = first + column
    # A negative start is a row of padding: its limit is where it begins.
    end = tl.where(first >= 0, limit, first)
    is_real = inside & (column < num_pairs + K - 1) & (position < end)
    is_pair = is_real & (column < num_pairs)
    token = tl.load(out_tokens + row * width + column, is_pair, other=0)
    token = tl.where(is_real, tl.where(is_pair, token, mask_token_id), 0)
    position = tl.where(is_real, position, -1)
    slot = slot_of(block_table + row * table_width, table_width, position, block_size)
    tl.store(tokens + out + column, token, inside)
    tl.store(positions + out + column, position, inside)
    tl.store(slots + out + column, slot, inside)
    tl.store(is_mask + out + column, is_real & (column >= num_pairs), inside)


def parallel_layout(
    out_tokens, accepted, start, block_table, *, block_size, max_length, mask_token_id, k
) -> ParallelLayout:
    """Launch `parallel_layout.parallel_layout`."""
    num_rows, width = out_tokens.shape
    columns, table_width = width + k - 1, block_table.shape[1]
    is_mask = out_tokens.new_empty(num_rows, columns, dtype=torch.bool)
    sample_index = out_tokens.new_empty(num_rows, k)
    outputs = *out_tokens.new_empty(3, num_rows, columns), is_mask, sample_index
    tile = min(_TILE, triton.next_power_of_2(columns))
    layout_kernel[(num_rows, triton.cdiv(columns, tile))](
        *(x.contiguous() for x in (out_tokens, accepted, start, block_table)),
        *outputs,
        width,
        table_width,
        block_size,
        min(max_length, table_width * block_size),
        mask_token_id,
        K=k,
        K_PADDED=triton.next_power_of_2(k),
        TILE=tile,
        num_warps=1 if tile <= 64 else 4,
        **FP_FUSION,
    )
    return ParallelLayout(*outputs)
