"""The Triton kernels of `chain_layout.py`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.chain_layout import ChainLayout
from draftlab.kernels.dependent_launch import launch_options
from draftlab.kernels.step_layout_triton import slot_of

_COLUMNS = 128  # entries of a row one program lays out
_TILE = 1024  # elements one program copies


@triton.jit
def chain_layout_kernel(
    positions, row_stride, column_stride, counts, block_table, table_width, block_size, width,
    later, num_rows, last_out, positions_out, slots_out, TILE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B, column tiles of width + later)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = positions + row * row_stride
    last = tl.load(source + (tl.load(counts + row) - 1) * column_stride)
    if part == 0:
        tl.store(last_out + row, last)
    column = part * TILE + tl.arange(0, TILE).to(tl.int64)
    observed = column < width
    ahead = column - width + 1
    position = tl.load(source + column * column_stride, mask=observed, other=-1)
    position = tl.where(observed | (last < 0), position, last + ahead)
    place = slot_of(block_table + row * table_width, table_width, position, block_size)
    out = tl.where(observed, row * width + column, num_rows * column + row)
    inside = column < width + later
    tl.store(positions_out + out, position, mask=inside)
    tl.store(slots_out + out, place, mask=inside)


@triton.jit
def last_rows_kernel(
    x, counts, out, width, size, ahead, TILE: tl.constexpr, GDC: tl.constexpr
):  # fmt: skip
    """Grid (B, tiles of what is copied of a row: columns of `size` elements, side by side)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    last = row * width + tl.load(counts + row) - 1
    inside = at < ahead * size
    tl.store(out + row * ahead * size + at, tl.load(x + last * size + at, mask=inside), mask=inside)


def chain_layout_triton(
    positions: Tensor, counts: Tensor, block_table: Tensor, block_size: int, later: int
) -> ChainLayout:
    """`chain_layout` in one launch."""
    rows, width = positions.shape
    block_table = block_table.contiguous()
    layout = ChainLayout(
        width,
        positions.new_empty(rows),
        positions.new_empty(rows * (width + later)),
        positions.new_empty(rows * (width + later)),
    )
    with torch.cuda.device_of(positions):
        chain_layout_kernel[(rows, triton.cdiv(width + later, _COLUMNS))](
            positions,
            *positions.stride(),
            counts.contiguous(),
            block_table,
            block_table.shape[1],
            block_size,
            width,
            later,
            rows,
            layout.last,
            layout.positions,
            layout.slots,
            TILE=_COLUMNS,
            **launch_options(positions.device),
        )
    return layout


def last_rows_triton(x: Tensor, counts: Tensor, ahead: int = 1) -> Tensor:
    """`last_rows` in one launch."""
    x = x.contiguous()
    rows, width = x.shape[:2]
    out = x.new_empty(rows, ahead, *x.shape[2:])
    size = x.numel() // (rows * width)
    with torch.cuda.device_of(x):
        last_rows_kernel[(rows, triton.cdiv(ahead * size, _TILE))](
            x, counts.contiguous(), out, width, size, ahead, TILE=_TILE, **launch_options(x.device)
        )
    return out
