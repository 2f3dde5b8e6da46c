"""Triton kernels of `swiglu/`: everything is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.launching import FP_FUSION, cdiv, next_power_of_2

_COLUMNS = 2048  # of one program, at most


@triton.jit
def swiglu_kernel(gate_up, out, columns, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row; grid (n, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = gate_up + row * 2 * columns + column
    gate = tl.load(at, mask=inside).to(tl.float32)
    up = tl.load(at + columns, mask=inside).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(out + row * columns + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(gate_up, gradient, d_gate_up, columns, BLOCK: tl.constexpr):
    """Compute the gradients of BLOCK gates and ups of one row, and SwiGLU again."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * 2 * columns + column
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + columns, mask=inside).to(tl.float32)
    at_y = gradient + row * columns + column
    d_y = tl.load(at_y, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = d_y * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + at + columns, (d_y * silu).to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(at_y, (silu * up).to(gradient.dtype.element_ty), mask=inside)


def swiglu(gate_up: Tensor) -> Tensor:
    """Launch `swiglu.swiglu`."""
    gate_up = gate_up.contiguous()
    columns = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), columns)
    if out.numel():
        grid, options = _grid(out)
        swiglu_kernel[grid](gate_up, out, columns, **options)
    return out


def swiglu_backward_(gate_up: Tensor, gradient: Tensor) -> Tensor:
    """Launch `swiglu.swiglu_backward_`.

    Raises:
        ValueError: if shapes do not fit together, or `gradient` is not contiguous.
    """
    gate_up = gate_up.contiguous()
    n, columns = len(gate_up), gate_up.shape[1] // 2
    if gradient.shape != (n, columns) or not gradient.is_contiguous():
        raise ValueError(
            f"expected a contiguous gradient [{n}, {columns}], found {list(gradient.shape)} with "
            f"strides {gradient.stride()}"
        )
    d_gate_up = torch.empty_like(gate_up)
    if gradient.numel():
        grid, options = _grid(gradient)
        swiglu_backward_kernel[grid](gate_up, gradient, d_gate_up, columns, **options)
    return d_gate_up


def _grid(rows: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    """Return the grid of rows [n, I] and the launch options."""
    n, columns = rows.shape
    block = min(_COLUMNS, next_power_of_2(columns))
    options = {"BLOCK": block, "num_warps": 8 if block > 1024 else 4} | FP_FUSION
    return (n, cdiv(columns, block)), options
