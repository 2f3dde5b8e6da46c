"""The kernels of `gated.py`: everything read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gated_kernel(gate_up, made, columns, BLOCK: tl.constexpr):
    """A program gates BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    read = gate_up + row * 2 * columns + column
    gate = tl.load(read, mask=inside).to(tl.float32)
    up = tl.load(read + columns, mask=inside).to(tl.float32)
    both = gate * tl.sigmoid(gate) * up
    tl.store(made + row * columns + column, both.to(made.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_kernel(gate_up, given, both, columns, BLOCK: tl.constexpr):
    """A program makes the gradients of BLOCK gates and ups of one row, and gates them again."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = row * 2 * columns + column
    gate = tl.load(gate_up + at, mask=inside).to(tl.float32)
    up = tl.load(gate_up + at + columns, mask=inside).to(tl.float32)
    place = given + row * columns + column
    owed = tl.load(place, mask=inside).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    of_gate = owed * up * (sigmoid + silu * (1 - sigmoid))
    tl.store(both + at, of_gate.to(both.dtype.element_ty), mask=inside)
    tl.store(both + at + columns, (owed * silu).to(both.dtype.element_ty), mask=inside)
    tl.store(place, (silu * up).to(given.dtype.element_ty), mask=inside)
