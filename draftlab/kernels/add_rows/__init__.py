"""`whole[index[i]] += rows[i]` in place, the gradient of `whole[index]`."""

from __future__ import annotations

from torch import Tensor

from draftlab.kernels.dispatch import triton_operator


@triton_operator("add_rows.triton")
def add_rows_(whole: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows[i] to whole[index[i]].

    Args:
        whole: [N, C]; its rows may lie apart (a slice of columns). Sums are rounded to its dtype.
        index: int64 [n], no row twice, so nothing depends on an order.
        rows: [n, C], of any strides.
    """
    whole.index_add_(0, index, rows)
