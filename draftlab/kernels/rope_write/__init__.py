"""Rotary embedding of queries and keys, and the write of new keys and values to the paged cache.

    q, k = rope(norm(q)), rope(norm(k)),  rope(x) = x · cos + rotate_half(x) · sin

One kernel does everything between a layer's qkv product and its attention: RMS norms of queries and
keys where a model has them, RoPE in the half-split layout (Su et al., arXiv:2104.09864), and the
cache write.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.paged_attention import write_paged


@triton_operator("rope_write.triton")
def rope_angles(
    positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, head_dim / 2] in `dtype`, computed in float32 as transformers.

    Args:
        positions: int64 [T]; −1 (padding) counts as 0.
        inv_freq: float32 [head_dim / 2].
        scaling: factor of both (the attention scaling of YaRN and others).
    """
    angle = positions.clamp(min=0)[:, None].float() * inv_freq
    return (angle.cos() * scaling).to(dtype), (angle.sin() * scaling).to(dtype)


@triton_operator("rope_write.triton")
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
    """Return rotated queries, and write rotated keys and the values to the pools.

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
    num_kv_heads, head_dim = key_pool.shape[2:]
    heads = qkv.unflatten(-1, (-1, head_dim))
    query, key, value = heads.split(
        [heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1
    )
    if q_norm is not None:
        query = F.rms_norm(query, (head_dim,), q_norm.to(query.dtype), eps)
        key = F.rms_norm(key, (head_dim,), k_norm.to(key.dtype), eps)
    cos, sin = (torch.cat([half, half], -1)[:, None] for half in angles)
    query, key = query * cos + _rotate_half(query) * sin, key * cos + _rotate_half(key) * sin
    write_paged.reference(key[None], value[None], key_pool, value_pool, slots[None])
    return query


def _rotate_half(x: Tensor) -> Tensor:
    """Return cat[−second half, first half] of the last dimension."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)
