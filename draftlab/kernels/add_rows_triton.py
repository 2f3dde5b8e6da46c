"""The kernel of `add_rows.py`: one read of each of the two, one write."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_rows_kernel(whole, index, rows, whole_stride, rows_stride, columns, BLOCK: tl.constexpr):
    """A program adds BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = whole + tl.load(index + row) * whole_stride + column
    added = tl.load(rows + row * rows_stride + column, mask=inside).to(tl.float32)
    found = tl.load(target, mask=inside).to(tl.float32)
    tl.store(target, (found + added).to(whole.dtype.element_ty), mask=inside)
