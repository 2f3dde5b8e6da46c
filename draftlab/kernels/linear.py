"""Matrix products of few rows, with what surrounds them in a decoder layer folded in.

At decoding, a product y = x Wᵀ takes as long as reading W. `linear` and `gated_linear` read it once
at nearly the speed of the memory, and take over the RMS norm of x, the residual and the gate, which
would otherwise be kernels of their own between which the memory idles. `linear_then_norm` begins
the norm that follows a product, so that its readers need not look at all of x before they start.

`linear_reference` and `gated_linear_reference` define the results. They run on CPUs, for more than
MAX_ROWS rows (where cuBLAS is the better kernel) and for dtypes the kernel does not take.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.linear_launch import Config, choose, launch, next_norm, padded_rows

MAX_ROWS = 64
_MOST_PARTS = 4096  # of Σ y²: a reader holds the parts of all rows in registers


@dataclass(frozen=True)
class Normed:
    """An RMS norm's result, perhaps without its division by the rms, which the reader then does.

    Attributes:
        rows: [M, K]; y · weight, or the whole norm.
        squares: float32 [P, R ≥ M]: Σ y² of each row, in P parts; None: `rows` are the whole norm.
        eps: of the norm.
    """

    rows: Tensor
    squares: Tensor | None
    eps: float

    def finished(self) -> Tensor:
        """The whole norm [M, K], in the rows' dtype."""
        if self.squares is None:
            return self.rows
        mean = self.squares.sum(0)[: len(self.rows), None] / self.rows.shape[1]
        return (self.rows.float() * torch.rsqrt(mean + self.eps)).to(self.rows.dtype)


def linear(
    x: Tensor | Normed,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """n(x) Wᵀ + bias + residual.

    Args:
        x: [M, Kin], 16-bit on CUDA for the kernel; or what `linear_then_norm` left.
        weight: [N, Kin], of x's dtype, contiguous.
        norm_weight: [Kin]; n is then the RMS norm with `eps`, otherwise the identity.
        residual: [M, N].
        bias: [N].
        out: [M, N] contiguous; where the result goes.
        config: None: chosen by shape. Only for measurements.

    Returns:
        [M, N] in x's dtype. The kernel accumulates in float32, rounds x · norm_weight once, and the
        result once.
    """
    x, squares, eps = _opened(x, eps)
    if not _takes(x, weight):
        x = Normed(x, squares, eps).finished()
        found = linear_reference(
            x, weight, norm_weight=norm_weight, eps=eps, residual=residual, bias=bias
        )
        return found if out is None else out.copy_(found)
    x, norm_weight = _narrow(x, norm_weight, eps)
    return launch(
        x, weight, None, norm_weight, eps, bias, residual, config, squares=squares, out=out
    )


def gated_linear(
    x: Tensor | Normed,
    gate: Tensor,
    up: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    config: Config | None = None,
) -> Tensor:
    """silu(n(x) gateᵀ) · (n(x) upᵀ): x [M, Kin], gate and up [I, Kin] → [M, I]; see `linear`."""
    x, squares, eps = _opened(x, eps)
    if not (_takes(x, gate) and _takes(x, up)):
        x = Normed(x, squares, eps).finished()
        return gated_linear_reference(x, gate, up, norm_weight=norm_weight, eps=eps)
    x, norm_weight = _narrow(x, norm_weight, eps)
    return launch(x, gate, up, norm_weight, eps, None, None, config, squares=squares)


def linear_then_norm(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    eps: float,
    *,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Normed]:
    """y = x Wᵀ + bias + residual, and y's RMS norm for the products that follow.

    Args:
        x: [M, Kin].
        weight: [N, Kin].
        norm_weight: [N], of the norm that follows; eps: its own.
        residual, bias, config: as `linear` has them.

    Returns:
        y [M, N] and its norm, rounded to y's dtype before the division by the rms (a product's
        reader divides its float32 sums), or after it where the kernel does not run.
    """
    config = config or choose(len(x), *weight.shape, False, False)
    parts = -(-len(weight) // config.tile) * padded_rows(len(x))
    # x · norm_weight before the division by the rms may exceed what float16 holds.
    begun = _takes(x, weight) and x.dtype != torch.float16 and parts <= _MOST_PARTS
    if not begun:
        y = linear(x, weight, residual=residual, bias=bias)
        return y, Normed(_normed(y, norm_weight, eps), None, eps)
    following = next_norm(norm_weight, x, config)
    y = launch(x, weight, None, None, 0.0, bias, residual, config, following=following)
    return y, Normed(following.rows, following.squares, eps)


def linear_reference(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """What `linear` computes, operation by operation."""
    y = F.linear(_normed(x, norm_weight, eps), weight, bias)
    return y if residual is None else residual + y


def gated_linear_reference(
    x: Tensor, gate: Tensor, up: Tensor, *, norm_weight: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """What `gated_linear` computes, operation by operation."""
    x = _normed(x, norm_weight, eps)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def _normed(x: Tensor, norm_weight: Tensor | None, eps: float) -> Tensor:
    if norm_weight is None:
        return x
    return F.rms_norm(x, (x.shape[-1],), norm_weight.to(x.dtype), eps)


def _opened(x: Tensor | Normed, eps: float) -> tuple[Tensor, Tensor | None, float]:
    """Rows, their squares where a division is still to be done, and the eps that goes with it."""
    return (x.rows, x.squares, x.eps) if isinstance(x, Normed) else (x, None, eps)


def _narrow(x: Tensor, norm_weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """In float16 the norm is done first: x · norm_weight may exceed what float16 holds."""
    if norm_weight is not None and x.dtype == torch.float16:
        return _normed(x, norm_weight, eps), None
    return x, norm_weight


def _takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes this product; loads of 16 bytes ask for rows aligned to 8."""
    return (
        x.is_cuda
        and len(x) <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
        and x.stride(-1) == 1
        and x.stride(0) % 8 == 0
        and x.shape[-1] % 8 == 0
    )
