"""Triton kernels of `chain_layout/`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.launching import launch_options
from draftlab.kernels.step_layout.triton import slot_of
from draftlab.kernels.step_layout.types import ChainLayout

_COLUMNS = 128  # entries of a row of one program
_TILE = 1024  # elements of one program


@triton.jit
def chain_layout_kernel(
    positions, row_stride, column_stride, counts, block_table, table_width, block_size, width,
    num_later, num_rows, last_out, positions_out, slots_out, TILE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Lay out one tile of a row; grid (B, tiles of width + num_later)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = positions + row * row_stride
    last = tl.load(source + (tl.load(counts + row) - 1) * column_stride)
    if program == 0:
        tl.store(last_out + row, last)
    column = program * TILE + tl.arange(0, TILE).to(tl.int64)
    is_verified = column < width
    offset = column - width + 1
    position = tl.load(source + column * column_stride, mask=is_verified, other=-1)
    position = tl.where(is_verified | (last < 0), position, last + offset)
    slot = slot_of(block_table + row * table_width, table_width, position, block_size)
    out = tl.where(is_verified, row * width + column, num_rows * column + row)
    inside = column < width + num_later
    tl.store(positions_out + out, position, mask=inside)
    tl.store(slots_out + out, slot, mask=inside)


@triton.jit
def last_rows_kernel(
    x, counts, out, width, size, num_columns, TILE: tl.constexpr, GDC: tl.constexpr
):  # fmt: skip
    """Copy one tile of a row's columns of `size` elements each; grid (B, tiles)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    last = row * width + tl.load(counts + row) - 1
    inside = at < num_columns * size
    tl.store(
        out + row * num_columns * size + at, tl.load(x + last * size + at, mask=inside), mask=inside
    )


def chain_layout(positions, counts, block_table, block_size, num_later) -> ChainLayout:
    """Launch `chain_layout.chain_layout`."""
    rows, width = positions.shape
    block_table = block_table.contiguous()
    outputs = positions.new_empty(rows), *positions.new_empty(2, rows * (width + num_later))
    chain_layout_kernel[(rows, triton.cdiv(width + num_later, _COLUMNS))](
        positions,
        *positions.stride(),
        counts.contiguous(),
        block_table,
        block_table.shape[1],
        block_size,
        width,
        num_later,
        rows,
        *outputs,
        TILE=_COLUMNS,
        **launch_options(positions.device),
    )
    return ChainLayout(width, *outputs)


def last_rows(x, counts, num_columns=1) -> Tensor:
    """Launch `chain_layout.last_rows`."""
    if x.shape[1] == num_columns:
        return x
    x = x.contiguous()
    rows, width = x.shape[:2]
    out = x.new_empty(rows, num_columns, *x.shape[2:])
    size = x.numel() // (rows * width)
    last_rows_kernel[(rows, triton.cdiv(num_columns * size, _TILE))](
        x,
        counts.contiguous(),
        out,
        width,
        size,
        num_columns,
        TILE=_TILE,
        **launch_options(x.device),
    )
    return out
