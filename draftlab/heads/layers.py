"""Layers of Llama-style heads: norm, feed-forward, rotary embedding, attention projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.heads.rope import attention_factor, rope_frequencies


class RMSNorm(nn.RMSNorm):
    """RMS norm in the input's dtype, since torch has no fused path for mixed dtypes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    """Llama's gated feed-forward: down(silu(gate(x)) · up(x))."""

    def __init__(self, size: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, intermediate, bias=False)
        self.up_proj = nn.Linear(size, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


Angles = tuple[Tensor, ...]
"""Tensors that layers compute from positions: cosines and sines; some families add more."""


class Rope(nn.Module):
    """Rotary embedding, half-split layout (servers §5: converters expect it)."""

    def __init__(self, head_dim: int, parameters: dict[str, Any]) -> None:
        super().__init__()
        self._exact = rope_frequencies(head_dim, parameters)
        self.scaling = attention_factor(parameters)
        self.register_buffer("frequencies", self._exact, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        # The buffer moves with the module but stays float32: at large positions bfloat16
        # frequencies give wrong angles.
        super()._apply(fn, recurse)
        self.frequencies = self._exact.to(self.frequencies.device)
        return self

    def angles(self, positions: Tensor) -> Angles:
        """Return cosines and sines [..., 1, head_dim / 2], float32, of positions [...]."""
        angle = positions[..., None, None].float() * self.frequencies
        if self.scaling == 1:
            return angle.cos(), angle.sin()
        return angle.cos() * self.scaling, angle.sin() * self.scaling


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Rotate x [..., heads, head_dim] by the `angles` of its positions, in float32 or wider.

    With fewer angles than pairs of channels only the first channels turn.
    """
    cos, sin = angles
    width = 2 * cos.shape[-1]
    first, second = at_least_float32(x[..., :width]).chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat([turned, x[..., width:]], -1)


def convolve_slots(rows: tuple[Tensor, Tensor], base: Tensor, dim: int) -> Tensor:
    """Return Σ_tap (base[tap] + delta[tap]) ⊙ y of the slot `tap` slots before, in y's shape.

    Args:
        rows: y [..., H], and delta [..., taps, groups], a number for H / groups channels each.
        base: [taps, H]. dim: the dimension of slots, not negative.
    """
    y, delta = rows
    groups, num_slots = delta.shape[-1], y.shape[dim]
    grouped, base = (x.unflatten(-1, (groups, -1)) for x in (y, base.to(y.dtype)))
    total = (base[0] + delta[..., 0, :, None]) * grouped
    for tap in range(1, len(base)):
        size = num_slots - tap
        coefficients = base[tap] + delta[..., tap, :, None].narrow(dim, tap, size)
        term = total.narrow(dim, tap, size) + coefficients * grouped.narrow(dim, 0, size)
        total = torch.cat([total.narrow(dim, 0, tap), term], dim)
    return total.flatten(-2)


class Attention(nn.Module):
    """Projections of grouped-query attention; the caller computes attention itself.

    With `qk_norm_eps` (Qwen3) an RMS norm over each head precedes the rotation of queries and keys.
    Angles may have more leading dimensions than x, so that one input at many positions is projected
    once.
    """

    def __init__(
        self,
        size_in: int,
        size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qk_norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(size_in, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(size_in, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(size_in, num_kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, size, bias=False)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (RMSNorm(head_dim, qk_norm_eps) for _ in range(2))

    def key_value_multiplications(self) -> int:
        """Return the multiplications of a row's keys and values."""
        return self.k_proj.weight.numel() + self.v_proj.weight.numel()

    def query(self, x: Tensor, angles: Angles) -> Tensor:
        """Return rotated queries [..., heads, head_dim]."""
        query = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        return rotate(query if self.q_norm is None else self.q_norm(query).to(query.dtype), angles)

    def key_value(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Return rotated keys [..., kv heads, head_dim], and values with x's leading dimensions."""
        shape = (self.num_kv_heads, self.head_dim)
        key = self.k_proj(x).unflatten(-1, shape)
        key = rotate(key if self.k_norm is None else self.k_norm(key).to(key.dtype), angles)
        return key, self.v_proj(x).unflatten(-1, shape)
