"""Matrix products of few rows, fused with the operations around them in a decoder layer.

    linear            y = norm(x) Wᵀ + bias + residual
    swiglu_linear     y = silu(norm(x) gateᵀ) · (norm(x) upᵀ)
    linear_then_norm  y = x Wᵀ + bias + residual, and norm(y)

At decoding, a product takes as long as reading W. These read it once at nearly the bandwidth of the
memory, and compute the RMS norm, the residual and SwiGLU, which would otherwise be kernels of their
own between which the memory idles. `linear_then_norm` begins the norm that follows a product, so
that the next product need not read all of x before it starts.

`linear_reference` and `swiglu_linear_reference` define the results. They run on CPUs, for more than
MAX_ROWS rows (where cuBLAS is the better kernel) and for dtypes the kernel does not take.

In float32 the kernel adds three TF32 products, which rounds like float32. cuBLAS chooses kernels
there that take up to eight times as long at seven rows as at six (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.linear.launch import Config, allocate_next_norm, choose, launch, padded_rows

MAX_ROWS = 64
_MAX_PARTS = 4096  # of Σ y²: the next product holds the parts of all rows in registers


@dataclass(frozen=True)
class DeferredNorm:
    """An RMS norm's result, possibly before the division by the rms, which the next product does.

    Attributes:
        rows: [M, K]; y · weight, or the complete norm.
        squares: float32 [P, R ≥ M]: Σ y² of each row, in P parts; None if `rows` is complete.
        eps: of the norm.
    """

    rows: Tensor
    squares: Tensor | None
    eps: float

    def complete(self) -> Tensor:
        """Return the complete norm [M, K], in the rows' dtype."""
        if self.squares is None:
            return self.rows
        mean = self.squares.sum(0)[: len(self.rows), None] / self.rows.shape[1]
        return (self.rows.float() * torch.rsqrt(mean + self.eps)).to(self.rows.dtype)


def linear(
    x: Tensor | DeferredNorm,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """Return norm(x) Wᵀ + bias + residual.

    Args:
        x: [M, Kin], of 16 or 32 bits on CUDA for the kernel; or the norm from `linear_then_norm`.
        weight: [N, Kin], of x's dtype, contiguous.
        norm_weight: [Kin]; the norm is then the RMS norm with `eps`, otherwise the identity.
        residual: [M, N].
        bias: [N].
        out: [M, N] contiguous that the result is written to.
        config: the tiling, for measurements; None: chosen by shape.

    Returns:
        [M, N] in x's dtype. The kernel accumulates in float32, rounds x · norm_weight once, and the
        result once.
    """
    x, squares, eps = _unpack(x, eps)
    if not _takes(x, weight):
        x = DeferredNorm(x, squares, eps).complete()
        y = linear_reference(
            x, weight, norm_weight=norm_weight, eps=eps, residual=residual, bias=bias
        )
        return y if out is None else out.copy_(y)
    x, norm_weight = _norm_fp16(x, norm_weight, eps)
    return launch(
        x, weight, None, norm_weight, eps, bias, residual, config, squares=squares, out=out
    )


def swiglu_linear(
    x: Tensor | DeferredNorm,
    gate: Tensor,
    up: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    config: Config | None = None,
) -> Tensor:
    """Return SwiGLU, silu(norm(x) gateᵀ) · (norm(x) upᵀ).

    Args:
        x: [M, Kin]; norm_weight, eps, config: as in `linear`.
        gate, up: [I, Kin].

    Returns:
        [M, I].
    """
    x, squares, eps = _unpack(x, eps)
    if not (_takes(x, gate) and _takes(x, up)):
        x = DeferredNorm(x, squares, eps).complete()
        return swiglu_linear_reference(x, gate, up, norm_weight=norm_weight, eps=eps)
    x, norm_weight = _norm_fp16(x, norm_weight, eps)
    return launch(x, gate, up, norm_weight, eps, None, None, config, squares=squares)


def linear_then_norm(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, DeferredNorm]:
    """Return y = x Wᵀ + bias + residual, and y's RMS norm for the products that follow.

    Args:
        x: [M, Kin].
        weight: [N, Kin].
        norm_weight: [N], of the norm that follows; eps: of that norm.
        residual, bias: as in `linear`.

    Returns:
        y [M, N] and its norm, rounded to y's dtype before the division by the rms (the next product
        divides its float32 sums), or after it where the kernel does not run.
    """
    config = choose(x, len(weight))
    parts = -(-len(weight) // config.tile) * padded_rows(len(x))
    # x · norm_weight before the division by the rms may overflow float16.
    defers = _takes(x, weight) and x.dtype != torch.float16 and parts <= _MAX_PARTS
    if not defers:
        y = linear(x, weight, residual=residual, bias=bias)
        return y, DeferredNorm(_normed(y, norm_weight, eps), None, eps)
    next_norm = allocate_next_norm(norm_weight, x, config)
    y = launch(x, weight, None, None, 0.0, bias, residual, config, next_norm=next_norm)
    return y, DeferredNorm(*next_norm[1:], eps)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return what `linear` computes, operation by operation."""
    y = F.linear(_normed(x, norm_weight, eps), weight, bias)
    return y if residual is None else residual + y


def swiglu_linear_reference(
    x: Tensor, gate: Tensor, up: Tensor, *, norm_weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """Return what `swiglu_linear` computes, operation by operation."""
    x = _normed(x, norm_weight, eps)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _normed(x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm of x, or x without a weight."""
    if norm_weight is None:
        return x
    return F.rms_norm(x, (x.shape[-1],), norm_weight.to(x.dtype), eps)


def _unpack(x: Tensor | DeferredNorm, eps: float) -> tuple[Tensor, Tensor | None, float]:
    """Return rows, their squares if the division is still to be done, and the norm's eps."""
    return (x.rows, x.squares, x.eps) if isinstance(x, DeferredNorm) else (x, None, eps)


def _norm_fp16(x: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Norm x first in float16, where x · norm_weight may overflow; return x and the weight left."""
    if norm_weight is not None and x.dtype == torch.float16:
        return _normed(x, norm_weight, eps), None
    return x, norm_weight


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether the kernel takes this product; 16-byte loads need rows aligned to 8."""
    return (
        x.is_cuda
        and len(x) <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and x.stride(-1) == 1
        and x.stride(0) % 8 == 0
        and x.shape[-1] % 8 == 0
    )
