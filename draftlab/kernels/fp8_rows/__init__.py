"""Rows in 8 bits (e4m3) with a scale each, as factors of a product (`fp8_linear`)."""

from __future__ import annotations

from torch import Tensor

from draftlab.kernels import fp8_linear
from draftlab.kernels.dispatch import triton_operator


@triton_operator("fp8_rows.triton")
def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `fp8_linear.quantise_rows` of x [n, k], on a GPU by one kernel: eager torch would pass
    over x seven times.
    """
    return fp8_linear.quantise_rows(x)
