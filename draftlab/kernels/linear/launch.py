"""The launch of `linear/triton.py`: a product's tiling and workspace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from draftlab.kernels.compile_ahead import real_tensors
from draftlab.kernels.launching import launch_options

_PARTIAL_FLOATS = 1 << 23
_MAX_TILES = 1 << 14


@dataclass(frozen=True)
class Config:
    """The tiling of a product.

    Attributes:
        tile: rows of W of one program.
        depth: elements of a row read in one step.
        split: programs that share a tile of rows (1 for SwiGLU).
        warps: of one program.
        stages: tiles that Triton keeps in flight, plus one.
        prefetch: elements of each row prefetched to L2 before the previous kernel is done; a power
            of two ≥ 256 and at most size_in / split, or 0.
    """

    tile: int
    depth: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    prefetch: int = 0


def choose(x: Tensor, num_out: int, swiglu: bool = False, normed: bool = False) -> Config:
    """Return the configuration for a product of x [M, Kin] with W [num_out, Kin].

    These were the fastest on an H200 at the shapes of Llama-3.1-8B (docs/benchmarks.md), inside a
    chain of layers or alone. A fused norm (`normed`) keeps Σ x² in registers and needs wider tiles;
    few rows of W are split, or read in deep steps, so that every multiprocessor has enough loads in
    flight.
    """
    num_rows, size_in = x.shape
    if x.dtype == torch.float32:
        return _choose_float32(num_rows, num_out, size_in, swiglu)
    if size_in <= 512 and num_out >= 1 << 15:  # short rows, many of them: no parts of a row
        return Config(64, 256, 1, 4, 2)
    if num_rows <= 8:
        if swiglu:
            return Config(32, 128, 1, 2, 6, 512)
        if normed:
            return Config(32, 256, 1 if num_out >= 8448 else 2, 2, 4)
        if size_in > 6144:
            return Config(16, 256, 1 if num_out >= 6144 else 2, 1, 5, 512)
        return Config(32, 256, 2, 2, 4, 512) if num_out >= 6144 else Config(16, 512, 1, 1, 4)
    if num_rows <= 16:
        if swiglu:
            return Config(32, 128, 1, 2, 5)
        if normed:
            return Config(64, 64, 1 if num_out >= 8448 else 4, 4, 6)
        if 8192 <= size_in < 12288:
            return Config(32, 256, 2, 2, 4, 1024)
        if num_out >= 6144 and size_in < 8192:
            return Config(16, 256, 1, 1, 5, 512)
        return Config(16, 512, 1, 1, 4)
    tiles = -(-num_out // 64)
    split = 1
    while not swiglu and split < 8 and tiles * split < 264 and size_in // (split * 2) >= 1024:
        split *= 2
    return Config(64, 64, split, 4, 5, 512)


def _choose_float32(num_rows: int, num_out: int, size_in: int, swiglu: bool) -> Config:
    """Return the configuration in float32, also measured at a width of 384 (docs/benchmarks.md)."""
    few = num_rows <= 16
    if swiglu:
        return Config(32, 64, 1, 2, 4) if few else Config(64, 32, 1, 4, 4)
    depth = 64 if few and max(size_in, num_out // 2) >= 4096 else 32
    return Config(64, depth, 2 if num_out >= 8192 else 4, 4, 4)


@lru_cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return buffers for partial sums and arrival counters (0 between launches) of split products.

    Launches share them, so split products must follow one another on one stream.

    Raises:
        RuntimeError: if they would be allocated inside a graph capture.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the first product of a process ran inside a graph capture, where its workspace would "
            "belong to the graph: run the work once before capturing it"
        )
    with real_tensors():
        partial = torch.empty(_PARTIAL_FLOATS, dtype=torch.float32, device=device)
        arrivals = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # any stream then reads zeros
    return partial, arrivals


def padded_rows(num_rows: int) -> int:
    """Return the kernel's number of rows: tensor cores take at least 8, and powers of two."""
    return max(8, 1 << (num_rows - 1).bit_length())


def allocate_next_norm(weight: Tensor, x: Tensor, config: Config) -> tuple[Tensor, ...]:
    """Return a norm's weight [N] and the buffers that `launch` of x fills for it.

    They are y · weight, [M, N], and Σ y² of each row in P parts, float32 [P, R]; see
    `linear.DeferredNorm`.
    """
    tiles = -(-len(weight) // config.tile)
    squares = x.new_empty(tiles, padded_rows(len(x)), dtype=torch.float32)
    return weight, x.new_empty(len(x), len(weight)), squares


def launch(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    config: Config | None = None,
    *,
    squares: Tensor | None = None,
    next_norm: tuple[Tensor, ...] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Launch the kernel, on CUDA or in Triton's interpreter; arguments are as in `linear`.

    Args:
        up: the second weight of SwiGLU, whose first is `weight`.
        squares: of a `DeferredNorm` whose rows are x.
        next_norm: of `allocate_next_norm`, for the norm that follows.
        out: [M, N] contiguous that the result is written to.
    """
    from draftlab.kernels.linear.triton import skinny_kernel

    num_rows, size_in = x.shape
    num_out = len(weight)
    config = config or choose(x, num_out, up is not None, norm_weight is not None)
    rows = padded_rows(num_rows)
    tiles = -(-num_out // config.tile)
    split = config.split
    floats = tiles * split * (config.tile + 1) * rows
    if up is not None or floats > _PARTIAL_FLOATS or tiles > _MAX_TILES:
        split = 1
    partial, arrivals = _workspace(x.device) if split > 1 else (None, None)
    steps = -(-size_in // (config.depth * split))
    # The last part is the shortest; nothing beyond a row is prefetched.
    shortest = size_in - (split - 1) * steps * config.depth
    prefetch = config.prefetch if config.prefetch <= shortest else 0
    if residual is not None:
        residual = residual.contiguous()
    if out is None:
        out = x.new_empty(num_rows, num_out)
    options = launch_options(x.device)
    if x.is_cuda:
        options |= {"num_warps": config.warps, "num_stages": config.stages}
    with torch.cuda.device_of(x):
        skinny_kernel[(tiles * split,)](
            x,
            weight,
            up,
            norm_weight,
            squares,
            bias,
            residual,
            out,
            *(next_norm or (None, None, None)),
            partial,
            arrivals,
            num_rows,
            num_out,
            size_in,
            x.stride(0),
            eps,
            PARTS=0 if squares is None else len(squares),
            PADDED=1 if squares is None else 1 << (len(squares) - 1).bit_length(),
            ROWS=rows,
            TILE=config.tile,
            DEPTH=config.depth,
            SPLIT=split,
            EVEN=size_in == steps * config.depth * split,
            PREFETCH=prefetch,
            WIDE=not x.is_cuda,
            PRECISION="tf32x3" if x.is_cuda and x.dtype == torch.float32 else "ieee",
            **options,
        )
    return out
