"""Products of 16-bit rows with a matrix in 8 bits (e4m3), which a GPU computes faster.

Each row and each output has a scale, as in torchtitan's rowwise float8 training: the largest number
of a row becomes e4m3's largest. A product has a relative error of about 4 %, of random sign. Sums
are float32. The gradient of a matrix is no product of this kind; it is computed in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_SCALE = 1e-30


class Float8Weight(NamedTuple):
    """A matrix W [out, in] for products with rows, and for those with their gradients.

    Attributes:
        codes: e4m3 [out, in]. scale: float32 [1, out].
        transposed: e4m3 [in, out], codes of Wᵀ. transposed_scale: float32 [1, in].
    """

    codes: Tensor
    scale: Tensor
    transposed: Tensor
    transposed_scale: Tensor


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 codes of x [n, k], and float32 scales [n, 1]: x ≈ codes · scale."""
    wide = x.float()
    scale = (wide.abs().amax(1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE)
    return (wide / scale).to(E4M3), scale


@torch.no_grad()
def quantise_weight(weight: Tensor) -> Float8Weight:
    """Return a matrix [out, in] in 8 bits."""
    codes, scale = quantise_rows(weight)
    transposed, transposed_scale = quantise_rows(weight.T.contiguous())
    return Float8Weight(codes, scale.T.contiguous(), transposed, transposed_scale.T.contiguous())


def product(x: Tensor, weight: Tensor | Float8Weight) -> Tensor:
    """Return x Wᵀ [n, out] of x [n, in] and W [out, in]."""
    if isinstance(weight, Float8Weight):
        return _scaled_product(x, weight.codes, weight.scale)
    return x @ weight.T


def input_gradient(gradient: Tensor, weight: Tensor | Float8Weight) -> Tensor:
    """Return the gradient [n, in] of x in `product`, from the product's gradient [n, out]."""
    if isinstance(weight, Float8Weight):
        return _scaled_product(gradient, weight.transposed, weight.transposed_scale)
    return gradient @ weight


def flatten(weights: Sequence[Any]) -> tuple[list[Tensor | None], list[bool]]:
    """Return the tensors of weights one by one, and which weights are in 8 bits."""
    in_8_bits = [isinstance(weight, Float8Weight) for weight in weights]
    flat: list[Tensor | None] = []
    for weight, several in zip(weights, in_8_bits, strict=True):
        flat.extend(weight if several else (weight,))
    return flat, in_8_bits


def unflatten(
    tensors: Sequence[Tensor | None], in_8_bits: Sequence[bool]
) -> tuple[Tensor | Float8Weight | None, ...]:
    """Return the weights that `flatten` was given."""
    rest = iter(tensors)
    return tuple(Float8Weight(*islice(rest, 4)) if several else next(rest) for several in in_8_bits)


def _scaled_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return x · Cᵀ [n, m] for C = codes [m, k] times their scales [1, m], in x's dtype."""
    rows, row_scale = quantise_rows(x)
    if x.is_cuda:
        return torch._scaled_mm(
            rows, codes.T, row_scale, scale, out_dtype=x.dtype, use_fast_accum=True
        )
    wide = (rows.float() @ codes.float().T) * row_scale * scale
    return wide.to(x.dtype)
