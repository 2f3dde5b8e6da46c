"""Features in 8 bits: e4m3 with a scale for each token and boundary, and what that costs.

A scale stretches the largest channel of a token's boundary to e4m3's largest number, 448. e4m3
keeps three bits of mantissa down to 2⁻⁶, so channels 28,000 times smaller than the largest still
have them: one massive activation does not drown the others, as it would in int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
TINIEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Quantised:
    """Features [n, F] of b boundaries, in 8 bits.

    Attributes:
        codes: e4m3 [n, F].
        scales: float32 [n, b]; a feature is its code times the scale of its token and boundary.
        error: float64 [F], over the tokens the sum of squares of what reading gives less what was.
        square: float64 [F], the sum of squares of what was.
    """

    codes: Tensor
    scales: Tensor
    error: Tensor
    square: Tensor


def quantise(features: Tensor, boundaries: int) -> Quantised:
    """Quantises features [n, F] on their device; no host waits for it.

    A token whose boundary is not finite there counts and is stored as zeros.
    """
    tokens, width = len(features), features.shape[-1] // max(boundaries, 1)
    codes = torch.empty_like(features, dtype=E4M3)
    scales = features.new_empty(tokens, boundaries, dtype=torch.float32)
    error, square = (features.new_empty(features.shape[-1], dtype=torch.float64) for _ in range(2))
    for number in range(boundaries):  # one at a time: float32 copies are large
        at = slice(number * width, (number + 1) * width)
        part = features[:, at]
        exact = part.float().where(part.isfinite().all(-1, keepdim=True), 0.0)
        largest = exact.abs().amax(-1)
        # By a tensor: a GPU would multiply by the rounded inverse of a number.
        scale = (largest / largest.new_full((), LARGEST)).clamp(min=TINIEST)
        codes[:, at] = (exact / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3)
        scales[:, number] = scale
        difference = dequantise(codes[:, at], scale[:, None]).float() - exact
        error[at] = difference.square().sum(0, dtype=torch.float64)
        square[at] = exact.square().sum(0, dtype=torch.float64)
    return Quantised(codes, scales, error, square)


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 features […, F] of e4m3 codes […, F] and float32 scales […, b], on their device."""
    boundaries = scales.shape[-1]
    width = codes.shape[-1] // max(boundaries, 1)
    features = torch.empty_like(codes, dtype=torch.bfloat16)
    for number in range(boundaries):  # one at a time: the products are float32 before they round
        at = slice(number * width, (number + 1) * width)
        features[..., at] = codes[..., at].bfloat16() * scales[..., number, None]
    return features


def relative_errors(error: Tensor, square: Tensor, boundaries: int) -> list[tuple[float, float]]:
    """For each boundary: error of all its channels together, and of its worst one (RMS / RMS).

    Args:
        error, square: float64 [F], of `Quantised`, summed over batches.
    """
    result = []
    width = len(error) // max(boundaries, 1)
    for number in range(boundaries):
        e, s = (sums[number * width : (number + 1) * width] for sums in (error, square))
        total = (e.sum() / s.sum().clamp(min=1e-300)).sqrt()
        worst = (e / s.clamp(min=1e-300)).max().sqrt()
        # Rounded: another order of summing must not change the manifest's bytes.
        result.append((float(f"{float(total):.3g}"), float(f"{float(worst):.3g}")))
    return result
