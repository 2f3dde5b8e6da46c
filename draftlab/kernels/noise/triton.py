"""The keyed noise of `noise/` inside Triton kernels: the same bits."""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.noise import Purpose

EMIT = tl.constexpr(int(Purpose.EMIT))
ACCEPT = tl.constexpr(int(Purpose.ACCEPT))
DRAFT = tl.constexpr(int(Purpose.DRAFT))
_GOLDEN = tl.constexpr(-0x61C8864680B583EB)


@triton.jit
def _logical_shift_right(x, BITS: tl.constexpr):
    """Return int64 x shifted right, with zeros moved in."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _splitmix64(x):
    """Return the finalizer of splitmix64 of x."""
    x = (x ^ _logical_shift_right(x, 30)) * -0x40A7B892E31B1A47
    x = (x ^ _logical_shift_right(x, 27)) * -0x6B2FB644ECCEEE15
    return x ^ _logical_shift_right(x, 31)


@triton.jit
def keyed_bits(seed, prompt, position, PURPOSE: tl.constexpr):
    """Return 64 well-mixed bits of int64 keys."""
    x = _splitmix64(seed + _GOLDEN)
    x = _splitmix64(x ^ prompt)
    return _splitmix64(x ^ (position * 8 + (PURPOSE + _GOLDEN)))


@triton.jit
def keyed_uniform(seed, prompt, position, PURPOSE: tl.constexpr):
    """Return uniform float64 in [0, 1), equal to the reference bit for bit."""
    bits = _logical_shift_right(keyed_bits(seed, prompt, position, PURPOSE), 11)
    return bits.to(tl.float64) * (0.5**53)


@triton.jit
def exponential(key, token):
    """Return Exponential(1) float32 of `keyed_bits` and int64 ids, the reference up to rounding."""
    bits = _logical_shift_right(_splitmix64(key ^ ((token + 1) * _GOLDEN)), 32)
    # (bits + ½) · 2⁻³² rounded once, as from float64.
    v = (2 * bits + 1).to(tl.float32) * (0.5**33)
    v = tl.minimum(v, 1 - 0.5**24)
    # Kahan's log1p: the ratio corrects the rounding of 1 − v.
    rounded = 1 - v
    subtracted = tl.where(rounded == 1, 1.0, 1 - rounded)
    return tl.where(rounded == 1, v, -tl.log(rounded) * (v / subtracted))
