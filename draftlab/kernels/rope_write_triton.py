"""The Triton kernels of `kernels/rope_write.py`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def angles_kernel(
    positions, inv_freq, cos, sin, scaling,
    HALF: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """One token a program. EXACT: with libdevice, which reduces large angles fully."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    half = tl.arange(0, PADDED)
    inside = half < HALF
    position = tl.maximum(tl.load(positions + token), 0).to(tl.float32)
    angle = position * tl.load(inv_freq + half, mask=inside, other=0.0)
    if EXACT:
        cosine, sine = libdevice.cos(angle), libdevice.sin(angle)
    else:
        cosine, sine = tl.cos(angle), tl.sin(angle)
    at = token * HALF + half
    tl.store(cos + at, (cosine * scaling).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + at, (sine * scaling).to(sin.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps"])
def rope_write_kernel(
    qkv, cos, sin, q_norm, k_norm, slots, query, key_pool, value_pool,
    qkv_row, key_block, key_offset, key_head, value_block, value_offset, value_head, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr, PADDED: tl.constexpr, HEADS: tl.constexpr, NORMS: tl.constexpr,
    GDC: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: of its queries, of its keys or of its values."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token, part = tl.program_id(0), tl.program_id(1)
    is_query = part < Q_PARTS
    is_value = part >= Q_PARTS + K_PARTS
    # The first head of the kind, this program's heads of the kind, and how many there are.
    base = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    before = tl.where(is_query, 0, tl.where(is_value, Q_PARTS + K_PARTS, Q_PARTS))
    count = tl.where(is_query, NUM_HEADS, NUM_KV_HEADS)
    head = (part - before) * HEADS + tl.arange(0, HEADS)[:, None]
    half = tl.arange(0, PADDED)[None, :]
    inside = (head < count) & (half < HALF)
    source = qkv + token * qkv_row + (base + head) * (2 * HALF) + half
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    if not is_value:
        if NORMS:
            squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
            scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
            norm = q_norm + half
            if not is_query:
                norm = k_norm + half
            first *= scale * tl.load(norm, mask=half < HALF, other=0.0).to(tl.float32)
            second *= scale * tl.load(norm + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        at = token * HALF + half
        cosine = tl.load(cos + at, mask=half < HALF, other=0.0).to(tl.float32)
        sine = tl.load(sin + at, mask=half < HALF, other=0.0).to(tl.float32)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned

    if is_query:
        to = query + (token * NUM_HEADS + head) * (2 * HALF) + half
        tl.store(to, first.to(query.dtype.element_ty), mask=inside)
        tl.store(to + HALF, second.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            to = key_pool + block * key_block + offset * key_offset + head * key_head
            if is_value:
                to = value_pool + block * value_block + offset * value_offset + head * value_head
            to += half
            tl.store(to, first.to(key_pool.dtype.element_ty), mask=inside)
            tl.store(to + HALF, second.to(key_pool.dtype.element_ty), mask=inside)
