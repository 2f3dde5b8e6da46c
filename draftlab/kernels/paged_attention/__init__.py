"""Attention over a paged KV cache: write new keys by slot, attend by block table.

A pool [P, S, kv heads, head_dim] holds P blocks of S positions. The key of position j of row b lies
at `pool[block_table[b, j // S], j % S]`; its slot is `block · S + offset` (PagedAttention, Kwon et
al., arXiv:2309.06180). The eager reference attends row by row (`paged_attention/plan.py`). The
kernels (`paged_attention/triton.py`) never read a number back to the host, so that they can be
captured in a CUDA graph.

On a CPU the usual cache has one block a row: its keys are then read in place, as a view.
"""

from __future__ import annotations

from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.paged_attention.plan import (
    attend_reads,
    check_heads,
    plan_reads,
    plan_writes,
    write_rows,
)


def slot_mapping(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Return slots int64 [B, M] of positions [B, M] in block tables int32 [B, N].

    −1, which is never written, for padding (position −1), for positions beyond the table and for
    those whose block is 0, which belongs to no row.
    """
    inside = (positions >= 0) & (positions < block_table.shape[1] * block_size)
    at = positions.where(inside, 0)
    blocks = block_table.gather(1, at // block_size).long()
    return (blocks * block_size + at % block_size).where(inside & (blocks > 0), -1)


@triton_operator("paged_attention.launch")
def write_paged(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor
) -> None:
    """Write the keys and values of new tokens into the pools, in place.

    Args:
        key, value: [B, M, kv heads, head_dim], any strides with a last one of 1.
        key_pool, value_pool: [P, S, kv heads, head_dim], contiguous, of the same dtype.
        slots: int64 [B, M], block · S + offset, all different; −1 writes nothing.
    """
    plan = plan_writes(slots)
    write_rows(key.flatten(0, 1), value.flatten(0, 1), key_pool, value_pool, plan)


@triton_operator("paged_attention.launch")
def attend_paged(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    last_seen: Tensor | None = None,
    prefetch_weight: Tensor | None = None,
) -> Tensor:
    """Return attention of new tokens over their rows' cached keys, their own included.

    A query at position q sees the keys j with max(0, q − window + 1, q // chunk · chunk) ≤ j ≤ q,
    or up to its `last_seen`.
    Pool entries that no query sees, and block table entries whose blocks hold no visible key, are
    never read: they may be stale, NaN, or another row's.

    Args:
        query: [B, M, heads, head_dim], any strides with a last one of 1. Query head h reads kv head
            h // (heads / kv heads).
        key_pool, value_pool: [P, S, kv heads, head_dim].
        block_table: int32 [B, N].
        positions: int64 [B, M]; the real ones of a row come first and are consecutive, the rest are
            −1 and yield zeros.
        scale: factor of the dot products.
        window: keys a query sees, itself included (sliding window).
        chunk: a query sees only keys of its own chunk of so many positions (Llama 4).
        softcap: scores become softcap · tanh(score / softcap) (Gemma 2).
        sinks: [heads]; a logit per head that joins the softmax and gives no value (gpt-oss).
        last_seen: int64 [B, M], the last key that each token sees, at or beyond its position, for
            tokens that see each other; −1 where the position is.
        prefetch_weight: 16-bit weights that the next kernel reads. The GPU prefetches them to L2,
            since attention of few tokens leaves the memory idle. It changes no result.

    Returns:
        The query's shape and dtype, contiguous.

    Raises:
        ValueError: if the heads are no multiple of the kv heads.
    """
    check_heads(query, key_pool)
    group, block_size = query.shape[2] // key_pool.shape[2], key_pool.shape[1]
    # One row at a time, so that each reads only what it sees, and in place.
    reads = plan_reads(
        block_table,
        positions,
        block_size,
        group,
        query.dtype,
        window=window,
        chunk=chunk,
        last_seen=last_seen,
    )
    return attend_reads(
        query, key_pool, value_pool, reads, scale=scale, softcap=softcap, sinks=sinks
    )
