"""Prefetching weights to the L2 cache before they are read."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)
"""16-bit elements (512 bytes) of one prefetch instruction."""


@triton.jit
def prefetch(addresses):
    """Prefetch CHUNK 16-bit elements at each address to L2; no result changes."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 512; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_share(weights, num_chunks, program, SHARE: tl.constexpr):
    """Prefetch the `program`-th SHARE (a power of two) of `num_chunks` chunks."""
    at = tl.minimum(program * SHARE + tl.arange(0, SHARE), num_chunks - 1)
    prefetch(weights + at.to(tl.int64) * CHUNK)
