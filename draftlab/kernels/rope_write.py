"""What lies between a layer's qkv product and its attention, in one kernel.

Norms of queries and keys where a model has them, rotary positions, and the writing of new keys and
values into the paged cache. `rope_write_reference` defines it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.dependent_launch import launch_options
from draftlab.kernels.paged_attention import write_paged_reference

_HEADS = 8
"""Heads of one program."""


def rope_angles(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, head_dim / 2] in `dtype`, made in float32 as transformers makes them.

    Args:
        positions: int64 [T]; −1 (padding) counts as 0.
        inv_freq: float32 [head_dim / 2].
        scaling: factor of both (attention_scaling of yarn and its like).
    """
    if positions.is_cuda:
        return launch_angles(positions, inv_freq, scaling, dtype)
    angle = positions.clamp(min=0)[:, None].float() * inv_freq
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


def rope_write(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotated queries; rotated keys and values go into the pools.

    Args:
        qkv: [T, (heads + 2 · kv heads) · head_dim], queries first, then keys, then values.
        angles: cosines and sines [T, head_dim / 2] from `rope_angles`; half-split layout.
        key_pool, value_pool: [P, S, kv heads, head_dim], written in place.
        slots: int64 [T], block · S + offset; −1 writes nothing.
        q_norm, k_norm: [head_dim], weights of RMS norms over each head before the rotation; both or
            neither.
        eps: of these norms.

    Returns:
        Queries [T, heads, head_dim], contiguous.
    """
    operation = launch if qkv.is_cuda else rope_write_reference
    return operation(
        qkv, angles, key_pool, value_pool, slots, q_norm=q_norm, k_norm=k_norm, eps=eps
    )


def rope_write_reference(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """`rope_write`, operation by operation."""
    num_kv_heads, head_dim = key_pool.shape[2:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    query, key, value = heads.split(
        [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1
    )
    if q_norm is not None:
        query = F.rms_norm(query, (head_dim,), q_norm.to(query.dtype), eps)
        key = F.rms_norm(key, (head_dim,), k_norm.to(key.dtype), eps)
    cos, sin = (torch.cat([half, half], -1)[:, None] for half in angles)
    query, key = query * cos + _half_turn(query) * sin, key * cos + _half_turn(key) * sin
    write_paged_reference(key[None], value[None], key_pool, value_pool, slots[None])
    return query


def _half_turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def launch_angles(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The kernel of `rope_angles`, on CUDA or in Triton's interpreter."""
    from draftlab.kernels.rope_write_triton import angles_kernel

    positions, half = positions.contiguous(), len(inv_freq)
    cos, sin = (positions.new_empty(len(positions), half, dtype=dtype) for _ in range(2))
    with torch.cuda.device_of(positions):
        angles_kernel[(len(positions),)](
            positions,
            inv_freq,
            cos,
            sin,
            scaling,
            HALF=half,
            PADDED=1 << (half - 1).bit_length(),
            EXACT=positions.device.type == "cuda",
            **launch_options(positions.device),
        )
    return cos, sin


def launch(
    qkv: Tensor,
    angles: tuple[Tensor, Tensor],
    key_pool: Tensor,
    value_pool: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The kernel of `rope_write`, on CUDA or in Triton's interpreter."""
    from draftlab.kernels.rope_write_triton import rope_write_kernel

    block_size, num_kv_heads, head_dim = key_pool.shape[1:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    query = qkv.new_empty(len(qkv), num_heads, head_dim)
    cos, sin = angles
    parts = -(-num_heads // _HEADS) + 2 * -(-num_kv_heads // _HEADS)
    with torch.cuda.device_of(qkv):
        rope_write_kernel[(len(qkv), parts)](
            qkv,
            cos,
            sin,
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
            PADDED=1 << (head_dim // 2 - 1).bit_length(),
            HEADS=_HEADS,
            NORMS=q_norm is not None,
            **launch_options(qkv.device),
        )
    return query
