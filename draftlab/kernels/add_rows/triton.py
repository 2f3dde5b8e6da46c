"""Triton kernel of `add_rows/`: both tensors are read once, and one is written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.launching import FP_FUSION, cdiv, next_power_of_2

_COLUMNS = 4096  # of one program, at most


@triton.jit
def add_rows_kernel(whole, index, rows, whole_stride, rows_stride, columns, BLOCK: tl.constexpr):
    """Add BLOCK columns of one row; grid (n, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = whole + tl.load(index + row) * whole_stride + column
    addend = tl.load(rows + row * rows_stride + column, mask=inside).to(tl.float32)
    value = tl.load(target, mask=inside).to(tl.float32)
    tl.store(target, (value + addend).to(whole.dtype.element_ty), mask=inside)


def add_rows_(whole: Tensor, index: Tensor, rows: Tensor) -> None:
    """Launch `add_rows.add_rows_`.

    Raises:
        ValueError: if shapes do not fit together, or the columns of `whole` are not adjacent.
    """
    columns = whole.shape[1]
    if rows.shape != (len(index), columns):
        raise ValueError(f"expected rows [{len(index)}, {columns}], found {list(rows.shape)}")
    if rows.numel() == 0:
        return
    if whole.stride(1) != 1:
        raise ValueError(f"expected columns side by side, found strides {whole.stride()}")
    if rows.stride(1) != 1:  # the gradient of a sum is one number, expanded
        rows = rows.contiguous()
    block = min(_COLUMNS, next_power_of_2(columns))
    add_rows_kernel[(len(index), cdiv(columns, block))](
        whole,
        index.contiguous(),
        rows,
        whole.stride(0),
        rows.stride(0),
        columns,
        BLOCK=block,
        num_warps=8 if block > 2048 else 4,
        **FP_FUSION,
    )
