"""Features in 8 bits: e4m3 codes with a scale for each token and boundary, and their error.

The scale maps the largest channel of a token's boundary to e4m3's largest number, 448. e4m3 keeps
three bits of mantissa down to 2⁻⁶, so channels up to 28,000 times smaller than the largest one keep
them too: massive activations do not erase the other channels, as they would in int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.fp8_linear import E4M3, LARGEST_E4M3, SMALLEST_SCALE


def quantise(features: Tensor, boundaries: int) -> dict[str, Tensor]:
    """Quantise features [n, F] of b boundaries on their device, without a host synchronisation.

    Returns:
        features: codes, e4m3 [n, F].
        scales: float32 [n, b]; a feature is its code times the scale of its token and boundary.
        error, square: float64 [F], sums over the tokens of the squared quantisation error and of
            the squared features.
    """
    tokens, width = len(features), features.shape[-1] // max(boundaries, 1)
    codes = torch.empty_like(features, dtype=E4M3)
    scales = features.new_empty(tokens, boundaries, dtype=torch.float32)
    error, square = (features.new_empty(features.shape[-1], dtype=torch.float64) for _ in range(2))
    for boundary in range(boundaries):  # one at a time: float32 copies are large
        channels = slice(boundary * width, (boundary + 1) * width)
        exact = features[:, channels].float()
        largest = exact.abs().amax(-1)
        # Divide by a tensor: a GPU would multiply by the rounded inverse of a number.
        scale = (largest / largest.new_full((), LARGEST_E4M3)).clamp(min=SMALLEST_SCALE)
        scaled = (exact / scale[:, None]).clamp(-LARGEST_E4M3, LARGEST_E4M3)
        codes[:, channels] = scaled.to(E4M3)
        scales[:, boundary] = scale
        difference = dequantise(codes[:, channels], scale[:, None]).float() - exact
        error[channels] = difference.square().sum(0, dtype=torch.float64)
        square[channels] = exact.square().sum(0, dtype=torch.float64)
    return {"features": codes, "scales": scales, "error": error, "square": square}


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """Return bfloat16 features […, F] of e4m3 codes […, F] and float32 scales […, b]."""
    boundaries = scales.shape[-1]
    width = codes.shape[-1] // max(boundaries, 1)
    features = torch.empty_like(codes, dtype=torch.bfloat16)
    for boundary in range(boundaries):  # one at a time: the products are float32 before rounding
        channels = slice(boundary * width, (boundary + 1) * width)
        features[..., channels] = codes[..., channels].bfloat16() * scales[..., boundary, None]
    return features


def relative_errors(error: Tensor, square: Tensor, boundaries: int) -> list[tuple[float, float]]:
    """Return each boundary's relative RMS error over all channels, and of its worst channel.

    Args:
        error, square: float64 [F], of `quantise`, summed over batches.
    """
    result = []
    width = len(error) // max(boundaries, 1)
    for boundary in range(boundaries):
        e, s = (sums[boundary * width : (boundary + 1) * width] for sums in (error, square))
        total = (e.sum() / s.sum().clamp(min=1e-300)).sqrt()
        worst = (e / s.clamp(min=1e-300)).max().sqrt()
        # Rounded: another order of summation must not change the manifest's bytes.
        result.append((float(f"{float(total):.3g}"), float(f"{float(worst):.3g}")))
    return result
