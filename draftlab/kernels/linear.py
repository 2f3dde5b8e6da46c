"""Matrix products of few rows, with what surrounds them in a decoder layer folded in.

At decoding, a product y = x Wᵀ takes as long as reading W. `linear` and `gated_linear` read it once
at nearly the speed of the memory, and take over the RMS norm of x, the residual and the gate, which
would otherwise be kernels of their own between which the memory idles.

`linear_reference` and `gated_linear_reference` define the results. They run on CPUs, for more than
MAX_ROWS rows (where cuBLAS is the better kernel) and for dtypes the kernel does not take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.dependent_launch import launch_options

MAX_ROWS = 64
_PARTIAL_FLOATS = 1 << 23
_MAX_TILES = 1 << 14


@dataclass(frozen=True)
class Config:
    """How the kernel cuts a product up.

    Attributes:
        tile: rows of W of one program.
        depth: elements of a row read in one step.
        split: programs that share a tile of rows (1 for gated products).
        warps: of one program.
        stages: tiles Triton keeps in flight, and one more.
        prefetch: elements of each row that L2 is asked for before the previous kernel is done; a
            power of two ≥ 256 and at most size_in / split, or 0.
    """

    tile: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    prefetch: int = 0


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """n(x) Wᵀ + bias + residual.

    Args:
        x: [M, Kin], 16-bit on CUDA for the kernel.
        weight: [N, Kin], of x's dtype, contiguous.
        norm_weight: [Kin]; n is then the RMS norm with `eps`, otherwise the identity.
        residual: [M, N].
        bias: [N].
        config: None: chosen by shape. Only for measurements.

    Returns:
        [M, N] in x's dtype. The kernel accumulates in float32, rounds x · norm_weight once, and the
        result once.
    """
    if not _takes(x, weight):
        return linear_reference(
            x, weight, norm_weight=norm_weight, eps=eps, residual=residual, bias=bias
        )
    return launch(x, weight, None, norm_weight, eps, bias, residual, config)


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    config: Config | None = None,
) -> Tensor:
    """silu(n(x) gateᵀ) · (n(x) upᵀ): x [M, Kin], gate and up [I, Kin] → [M, I]; see `linear`."""
    if not (_takes(x, gate) and _takes(x, up)):
        return gated_linear_reference(x, gate, up, norm_weight=norm_weight, eps=eps)
    return launch(x, gate, up, norm_weight, eps, None, None, config)


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


def choose(num_rows: int, num_out: int, size_in: int, gated: bool, normed: bool) -> Config:
    """The configuration for a product of `num_rows` rows with W [num_out, size_in].

    The winners of `eval/gpu/linear.py` on an H200 (docs/results/decode.md) at the shapes of
    Llama-3.1-8B, by what decides them: a folded norm keeps Σx² in registers and wants wider tiles,
    and few rows of W are split so that every multiprocessor has work.
    """
    if num_rows <= 8:
        if gated:
            return Config(32, 128, 1, 2, 6)
        if normed:
            return Config(32, 256, 1 if num_out >= 8448 else 2, 2, 4)
        return Config(16, 256, 1 if num_out >= 6144 else 2, 1, 5, 1024)
    if num_rows <= 16:
        if gated or (normed and num_out >= 8448):
            return Config(64, 64, 1, 4, 6)
        if normed:
            return Config(64, 64, 4, 4, 6)
        if size_in >= 12288:
            return Config(16, 512, 1, 1, 4)
        return Config(32, 256, 2, 2, 4, 1024) if size_in >= 8192 else Config(64, 128, 4, 4, 4)
    tiles = -(-num_out // 64)
    split = 1
    while not gated and split < 8 and tiles * split < 264 and size_in // (split * 2) >= 1024:
        split *= 2
    return Config(64, 64, split, 4, 5, 512)


@lru_cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Partial sums, and counters of arrivals (0 between launches), of split products.

    Launches share them, so split products must follow one another on one stream.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first product of a process came inside a graph capture, where its workspace would "
            "belong to the graph: run the work once before capturing it"
        )
    partial = torch.empty(_PARTIAL_FLOATS, dtype=torch.float32, device=device)
    arrivals = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # whichever stream comes next finds zeros
    return partial, arrivals


def launch(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    config: Config | None = None,
) -> Tensor:
    """The kernel itself, on CUDA or in Triton's interpreter; arguments as `linear` has them."""
    from draftlab.kernels.linear_triton import skinny_kernel

    if norm_weight is not None and x.dtype == torch.float16:
        # x · norm_weight before the division by the rms may exceed what float16 holds.
        x, norm_weight = _normed(x, norm_weight, eps), None
    num_rows, size_in = x.shape
    num_out = len(weight)
    normed = norm_weight is not None
    config = config or choose(num_rows, num_out, size_in, up is not None, normed)
    rows = max(8, 1 << (num_rows - 1).bit_length())
    tiles = -(-num_out // config.tile)
    split = config.split
    floats = tiles * split * (config.tile + 1) * rows
    if up is not None or floats > _PARTIAL_FLOATS or tiles > _MAX_TILES:
        split = 1
    partial, arrivals = _workspace(x.device) if split > 1 else (x, x)
    steps = -(-size_in // (config.depth * split))
    # The last part is the shortest, and nothing beyond a row is asked for.
    shortest = size_in - (split - 1) * steps * config.depth
    prefetch = config.prefetch if config.prefetch <= shortest else 0
    if residual is not None:
        residual = residual.contiguous()
    out = x.new_empty(num_rows, num_out)
    options = launch_options(x.device)
    if x.is_cuda:
        options |= {"num_warps": config.warps, "num_stages": config.stages}
    with torch.cuda.device_of(x):
        skinny_kernel[(tiles * split,)](
            x,
            weight,
            weight if up is None else up,
            weight if norm_weight is None else norm_weight,
            weight if bias is None else bias,
            out if residual is None else residual,
            out,
            partial,
            arrivals,
            num_rows,
            num_out,
            size_in,
            x.stride(0),
            eps,
            GATED=up is not None,
            NORM=norm_weight is not None,
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            ROWS=rows,
            TILE=config.tile,
            DEPTH=config.depth,
            SPLIT=split,
            EVEN=size_in == steps * config.depth * split,
            PREFETCH=prefetch,
            WIDE=not x.is_cuda,
            **options,
        )
    return out
