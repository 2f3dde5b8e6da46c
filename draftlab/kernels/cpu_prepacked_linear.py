"""Matrix products of few rows on a CPU, with weights prepacked in oneDNN's layout.

MKL packs a float32 weight again in every product of more than one row: five rows, as in verifying
four drafts, cost 2.6 times as much as one. oneDNN packs the weight once and reads it once, whatever
the number of rows (docs/benchmarks.md). The operators are those that torch.compile calls on CPUs.
They are not public, so `why_no_prepacking` checks for them first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_DTYPES = (torch.float32, torch.bfloat16)
_OPERATORS = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")


def why_no_prepacking(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why products on `device` in `dtype` cannot be prepacked, or None if they can."""
    if device.type != "cpu":
        return f"prepacking is for CPUs, not for {device.type}"
    if dtype not in _DTYPES:
        return f"oneDNN prepacks float32 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    if not all(hasattr(torch.ops.mkldnn, name) for name in _OPERATORS):
        return "this release of torch has no prepacked products of oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 products"
    return None


class RowNorm:
    """RMS norm over the last dimension; in float32 four operations, where torch's takes nine.

    Args:
        weight: [H].
        eps: added to the mean square.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, size = weight.detach(), eps, len(weight)
        # x · w / √(Σx² / H + eps) = x / √(Σx² + H · eps) · w √H
        self.scaled = self.weight * size**0.5
        self.floor = self.weight.new_tensor((size * eps) ** 0.5)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., H], in its dtype."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x / torch.hypot(length, self.floor) * self.scaled


class PrepackedLinear:
    """The function x ↦ activation(x Wᵀ + bias), with a copy of W in oneDNN's layout.

    Args:
        weight: [N, Kin], float32 or bfloat16 on a CPU; later changes have no effect.
        bias: [N].
        activation: "none", or "swish" (silu).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, activation: str = "none"
    ) -> None:
        self.bias, self.activation = bias, activation
        self.num_bytes = weight.numel() * weight.element_size()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """Return [M, N] for x [M, Kin], in its dtype."""
        return torch.ops.mkldnn._linear_pointwise.default(
            x, self._weight, self.bias, self.activation, [], ""
        )

    def add_to(self, other: Tensor, x: Tensor) -> Tensor:
        """Return other + x Wᵀ + bias; `other` [M, N] is not changed."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self.bias, "add")

    def multiply(self, other: Tensor, x: Tensor) -> Tensor:
        """Return other · (x Wᵀ + bias); `other` [M, N] is not changed."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self.bias, "mul")


class PrepackedSwiGLU:
    """Llama's feed-forward, x ↦ down(silu(gate(x)) · up(x)) + residual, prepacked.

    Args:
        gate, up: [I, H].
        down: [H, I].
    """

    def __init__(self, gate: Tensor, up: Tensor, down: Tensor) -> None:
        self.gate = PrepackedLinear(gate, activation="swish")
        self.up, self.down = PrepackedLinear(up), PrepackedLinear(down)
        self.num_bytes = self.gate.num_bytes + self.up.num_bytes + self.down.num_bytes

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + the feed-forward of x, both [M, H]."""
        return self.down.add_to(residual, self.up.multiply(self.gate(x), x))
