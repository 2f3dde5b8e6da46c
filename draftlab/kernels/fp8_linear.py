"""Products of 16-bit rows with a weight matrix in 8 bits (e4m3), which a GPU computes faster.

Each row of x and of W in x Wᵀ has a scale, which maps the row's largest number to e4m3's largest,
448. W is also quantised by columns, for the gradient of x. Scales are computed anew for each batch.
torchtitan's float8 recipe `rowwise` scales alike, but computes the gradient of W in 8 bits too;
here it is computed in 16 bits. For normally distributed numbers a product has a relative error of
4 %, of random sign. A GPU adds up with fewer bits than float32 (fast accumulation): in a simulation
with 14 bits, sums over 32,000 columns came out 2 % too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
SIZE_MULTIPLE = 16
"""torch._scaled_mm takes matrices whose sizes are multiples of it."""


Quantise = Callable[[Tensor], tuple[Tensor, Tensor]]
"""`quantise_rows`, or `fp8_rows.quantise_rows` where torch.compile does not fuse it."""


class Fp8Weight(NamedTuple):
    """A matrix W [out, in] in 8 bits, once for `linear` and once for `input_gradient`.

    Attributes:
        codes: e4m3 [out, in]; W is about codes · scaleᵀ.
        scale: float32 [1, out], of each row of W.
        transposed: e4m3 [in, out]; Wᵀ is about transposed · transposed_scaleᵀ.
        transposed_scale: float32 [1, in], of each column of W.
    """

    codes: Tensor
    scale: Tensor
    transposed: Tensor
    transposed_scale: Tensor


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes of x [n, k] and float32 scales [n, 1], so that x is about codes · scales.

    A number that is not finite makes the products of its row NaN, so that the loss shows it.
    """
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST_E4M3).clamp(min=SMALLEST_SCALE)
    return (wide / scale).to(E4M3), scale


def quantise_weight(weight: Tensor, quantise: Quantise = quantise_rows) -> Fp8Weight:
    """Return a matrix [out, in] in 8 bits; no gradient flows through it."""
    with torch.no_grad():  # as a decorator it would hide this function's code from torch.compile
        codes, scale = quantise(weight)
        transposed, transposed_scale = quantise(weight.T.contiguous())
    return Fp8Weight(codes, scale.T.contiguous(), transposed, transposed_scale.T.contiguous())


def linear(x: Tensor, weight: Tensor | Fp8Weight, quantise: Quantise = quantise_rows) -> Tensor:
    """Return x Wᵀ [n, out] of x [n, in] and W [out, in], in x's dtype."""
    if isinstance(weight, Fp8Weight):
        return _scaled_product(x, weight.codes, weight.scale, quantise)
    return x @ weight.T


def input_gradient(
    gradient: Tensor, weight: Tensor | Fp8Weight, quantise: Quantise = quantise_rows
) -> Tensor:
    """Return the gradient [n, in] of x in `linear`, from the gradient [n, out] of its result."""
    if isinstance(weight, Fp8Weight):
        return _scaled_product(gradient, weight.transposed, weight.transposed_scale, quantise)
    return gradient @ weight


def _scaled_product(x: Tensor, codes: Tensor, scale: Tensor, quantise: Quantise) -> Tensor:
    """Return x Cᵀ [n, m] of x [n, k] and C = codes [m, k] · scale [1, m] transposed."""
    rows, row_scale = quantise(x)
    if x.is_cuda:
        return torch._scaled_mm(
            rows, codes.T, row_scale, scale, out_dtype=x.dtype, use_fast_accum=True
        )
    # On a CPU not every supported torch takes a scale for each row. Autocast leaves float64 alone.
    return ((rows.double() @ codes.double().T) * row_scale * scale).to(x.dtype)


def flatten_weights(
    weights: Sequence[Tensor | Fp8Weight | None],
) -> tuple[list[Tensor | None], list[bool]]:
    """Return the tensors of weights one after the other, and which weights are in 8 bits."""
    in_fp8 = [isinstance(weight, Fp8Weight) for weight in weights]
    tensors: list[Tensor | None] = []
    for weight, fp8 in zip(weights, in_fp8, strict=True):
        tensors.extend(weight if fp8 else (weight,))
    return tensors, in_fp8


def unflatten_weights(
    tensors: Sequence[Tensor | None], in_fp8: Sequence[bool]
) -> tuple[Tensor | Fp8Weight | None, ...]:
    """Return the weights that `flatten_weights` took."""
    rest = iter(tensors)
    return tuple(Fp8Weight(*islice(rest, 4)) if fp8 else next(rest) for fp8 in in_fp8)
