"""Triton kernels of `rope_write/`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from draftlab.kernels.launching import launch_options

_HEADS = 8  # of one program


@triton.jit
def angles_kernel(
    positions, inv_freq, cos, sin, scaling,
    HALF: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Compute one token's angles. EXACT: by libdevice, which reduces large angles fully."""
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
    """Process HEADS heads of one token: of its queries, of its keys or of its values."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    K_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    token, part = tl.program_id(0), tl.program_id(1)
    is_query = part < Q_PARTS
    is_value = part >= Q_PARTS + K_PARTS
    # The first head of this program's kind, the programs of the kinds before it, and its heads.
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
        rotated = first * cosine - second * sine
        second = second * cosine + first * sine
        first = rotated

    if is_query:
        target = query + (token * NUM_HEADS + head) * (2 * HALF) + half
        tl.store(target, first.to(query.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
            target = key_pool + block * key_block + offset * key_offset + head * key_head
            if is_value:
                target = value_pool + block * value_block + offset * value_offset
                target += head * value_head
            target += half
            tl.store(target, first.to(key_pool.dtype.element_ty), mask=inside)
            tl.store(target + HALF, second.to(key_pool.dtype.element_ty), mask=inside)


def rope_angles(positions, inv_freq, scaling, dtype) -> tuple[Tensor, Tensor]:
    """Launch `rope_write.rope_angles`."""
    positions, half = positions.contiguous(), len(inv_freq)
    cos, sin = (positions.new_empty(len(positions), half, dtype=dtype) for _ in range(2))
    angles_kernel[(len(positions),)](
        positions,
        inv_freq,
        cos,
        sin,
        scaling,
        HALF=half,
        PADDED=triton.next_power_of_2(half),
        EXACT=positions.device.type == "cuda",
        **launch_options(positions.device),
    )
    return cos, sin


def rope_write(
    qkv, angles, key_pool, value_pool, slots, *, q_norm=None, k_norm=None, eps=0.0
) -> Tensor:
    """Launch `rope_write.rope_write`."""
    block_size, num_kv_heads, head_dim = key_pool.shape[1:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    parts = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
    rope_write_kernel[(len(qkv), parts)](
        qkv,
        *angles,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        slots.contiguous(),
        query,
        key_pool,
        value_pool,
        qkv.stride(0),
        *key_pool.stride()[:3],
        *value_pool.stride()[:3],
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        HALF=head_dim // 2,
        PADDED=triton.next_power_of_2(head_dim // 2),
        HEADS=_HEADS,
        NORMS=q_norm is not None,
        **launch_options(qkv.device),
    )
    return query
