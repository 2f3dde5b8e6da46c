"""Adding rows to some rows of a tensor, in place: what a gradient of picked rows has to do."""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.dependent_launch import FP_FUSION

_COLUMNS = 4096
"""Of one program, at most."""


def add_rows_(whole: Tensor, index: Tensor, rows: Tensor) -> None:
    """whole[index[i]] += rows[i].

    Args:
        whole: [N, C]; its rows may lie apart (a slice of columns). Sums are rounded to its dtype.
        index: int64 [n], no row twice, so nothing depends on an order.
        rows: [n, C], of any strides.
    """
    exact = whole.dtype == torch.float64  # the kernel adds in float32
    operation = launch_ if whole.is_cuda and not exact else add_rows_reference_
    operation(whole, index, rows)


def add_rows_reference_(whole: Tensor, index: Tensor, rows: Tensor) -> None:
    """`add_rows_`, operation by operation."""
    whole.index_add_(0, index, rows)


def launch_(whole: Tensor, index: Tensor, rows: Tensor) -> None:
    """The kernel of `add_rows_`, on CUDA or in Triton's interpreter.

    Raises:
        ValueError: if shapes do not fit together, or columns lie apart.
    """
    from draftlab.kernels.add_rows_triton import add_rows_kernel

    columns = whole.shape[1]
    if rows.shape != (len(index), columns):
        raise ValueError(f"expected rows [{len(index)}, {columns}], found {list(rows.shape)}")
    if rows.numel() == 0:
        return
    if whole.stride(1) != 1:
        raise ValueError(f"expected columns side by side, found strides {whole.stride()}")
    if rows.stride(1) != 1:  # the gradient of a sum is one number, expanded
        rows = rows.contiguous()
    block = min(_COLUMNS, 1 << (columns - 1).bit_length())
    with torch.cuda.device_of(whole):
        add_rows_kernel[(len(index), -(-columns // block))](
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
