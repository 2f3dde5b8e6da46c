"""Asking the L2 cache for weights before they are read."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(256)
"""Elements (512 bytes) one prefetch instruction asks for."""


@triton.jit
def prefetch(addresses):
    """Asks L2 for CHUNK 16-bit elements at each address; changes nothing that can be read."""
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
    """Asks for the `program`-th SHARE (a power of two) of `num_chunks` chunks."""
    at = tl.minimum(program * SHARE + tl.arange(0, SHARE), num_chunks - 1)
    prefetch(weights + at.to(tl.int64) * CHUNK)
