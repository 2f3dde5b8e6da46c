"""Triton kernel of `fp8_rows/`: a program reads a row for its largest number and, mostly from L2,
again for its codes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.fp8_linear import E4M3, LARGEST_E4M3, SMALLEST_SCALE
from draftlab.kernels.launching import FP_FUSION, next_power_of_2

_TILE = 4096  # columns at a time, at most


@triton.jit
def quantise_rows_kernel(x, codes, scales, stride, columns, LARGEST, SMALLEST, TILE: tl.constexpr):
    """Quantise one row; grid (n,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.float32)
    not_finite = tl.zeros([TILE], tl.float32)  # NaN where a number is not finite
    for begin in range(0, columns, TILE):
        at = begin + lane
        values = tl.load(x + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        not_finite += values - values
    scale = tl.div_rn(tl.max(largest, 0), LARGEST)
    scale = tl.maximum(scale, SMALLEST) + tl.sum(not_finite, 0)
    tl.store(scales + row, scale)
    for begin in range(0, columns, TILE):
        at = begin + lane
        values = tl.load(x + row * stride + at, mask=at < columns, other=0.0).to(tl.float32)
        code = tl.div_rn(values, tl.zeros_like(values) + scale).to(codes.dtype.element_ty)
        tl.store(codes + row * columns + at, code, mask=at < columns)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Launch `fp8_rows.quantise_rows`; the columns of x lie side by side."""
    if x.stride(1) != 1:
        raise ValueError(f"expected columns side by side, found strides {x.stride()}")
    codes = torch.empty(x.shape, dtype=E4M3, device=x.device)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    if x.numel():
        tile = min(_TILE, next_power_of_2(x.shape[1]))
        quantise_rows_kernel[(len(x),)](
            x,
            codes,
            scales,
            x.stride(0),
            x.shape[1],
            LARGEST_E4M3,
            SMALLEST_SCALE,
            TILE=tile,
            num_warps=8 if tile > 1024 else 4,
            **FP_FUSION,
        )
    return codes, scales
