"""The keyed noise of `noise.py` for Triton kernels: the same bits, to be called inside a kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.noise import Purpose

EMIT = tl.constexpr(int(Purpose.EMIT))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
DRAFT = tl.constexpr(int(Purpose.DRAFT))
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)


@triton.jit
def _shift(x, BITS: tl.constexpr):
    """Logical right shift of int64."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x):
    """The finaliser of splitmix64."""
    x = (x ^ _shift(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _shift(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _shift(x, 31)


@triton.jit
def keyed_bits(seed, prompt, position, PURPOSE: tl.constexpr):
    """64 well-mixed bits of int64 keys."""
    x = _mix(seed + _GOLDEN)
    x = _mix(x ^ prompt)
    return _mix(x ^ (position * 8 + (PURPOSE + _GOLDEN)))


@triton.jit
def keyed_uniform(seed, prompt, position, PURPOSE: tl.constexpr):
    """Uniform float64 in [0, 1), exactly the reference's."""
    return _shift(keyed_bits(seed, prompt, position, PURPOSE), 11).to(tl.float64) * (0.5**53)


@triton.jit
def exponential(key, token):
    """Exponential(1) float32 of `keyed_bits` and int64 token ids, the reference's to rounding."""
    bits = _shift(_mix(key ^ ((token + 1) * _GOLDEN)), 32)
    # (bits + ½) · 2⁻³² rounded once, as from float64.
    v = (2 * bits + 1).to(tl.float32) * (0.5**33)
    v = tl.minimum(v, 1 - 0.5**24)
    # Kahan's log1p: what rounding took from 1 − v is put back by the ratio.
    rest = 1 - v
    lost = tl.where(rest == 1, 1.0, 1 - rest)
    return tl.where(rest == 1, v, -tl.log(rest) * (v / lost))
