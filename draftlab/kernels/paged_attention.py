"""Attention over a paged key-value cache: write new keys by slot, attend by block table.

A pool [P, S, kv heads, head_dim] holds P blocks of S positions. The key of position j of row b lies
at `pool[block_table[b, j // S], j % S]`; its slot is `block · S + offset`. This file is the entry
point and, with `paged_plan.py`, the eager reference; `paged_attention_triton.py` does the same on a
GPU without ever asking the device for a number, so that it can be captured in a CUDA graph.

On a CPU the usual cache has one block a row: its keys are then read in place, as a view.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from draftlab.kernels.paged_plan import attend_reads, plan_reads, plan_writes, write_rows


def slot_mapping(block_table: Tensor, positions: Tensor, block_size: int) -> Tensor:
    """Slots int64 [B, M] of positions [B, M] in tables int32 [B, N].

    −1, which is never written, for padding (position −1), for positions beyond the table and for
    those whose block is 0: the row does not own them.
    """
    inside = (positions >= 0) & (positions < block_table.shape[1] * block_size)
    at = positions.where(inside, 0)
    blocks = block_table.gather(1, at // block_size).long()
    return (blocks * block_size + at % block_size).where(inside & (blocks > 0), -1)


def write_paged(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor
) -> None:
    """Writes the keys and values of new tokens into the pools, in place.

    Args:
        key, value: [B, M, kv heads, head_dim], any strides with a last one of 1.
        key_pool, value_pool: [P, S, kv heads, head_dim], contiguous, of the same dtype.
        slots: int64 [B, M], block · S + offset, all different; −1 writes nothing.
    """
    if key.is_cuda:
        from draftlab.kernels.paged_attention_launch import write_paged_triton as write
    else:
        write = write_paged_reference
    write(key, value, key_pool, value_pool, slots)


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
    ahead: Tensor | None = None,
) -> Tensor:
    """Causal attention of new tokens over their rows' cached keys, their own included.

    A query at position q sees the keys j with max(0, q − window + 1, q // chunk · chunk) ≤ j ≤ q.
    Pool entries that no query sees, and block table entries that hold none but such, are never
    read: they may be stale, NaN, or another row's.

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
        ahead: 16-bit weights that the next kernel reads: on a GPU they are asked into L2 meanwhile,
            since attention of few tokens leaves the memory idle. Changes no result.

    Returns:
        [B, M, heads, head_dim] in the query's dtype, contiguous.

    Raises:
        ValueError: when the heads are no multiple of the kv heads.
    """
    if query.shape[2] % key_pool.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads cannot share {key_pool.shape[2]} kv heads evenly"
        )
    attend: Callable[..., Tensor] = attend_paged_reference
    if query.is_cuda:
        from draftlab.kernels.paged_attention_launch import attend_paged_triton

        attend = partial(attend_paged_triton, ahead=ahead)
    return attend(
        query,
        key_pool,
        value_pool,
        block_table,
        positions,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks=sinks,
    )


def write_paged_reference(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, slots: Tensor
) -> None:
    """`write_paged`, eager."""
    plan = plan_writes(slots)
    write_rows(key.flatten(0, 1), value.flatten(0, 1), key_pool, value_pool, plan)


def attend_paged_reference(
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
) -> Tensor:
    """`attend_paged`, eager, one row at a time: so each reads only what it sees, and in place."""
    group, block_size = query.shape[2] // key_pool.shape[2], key_pool.shape[1]
    reads = plan_reads(
        block_table, positions, block_size, group, query.dtype, window=window, chunk=chunk
    )
    return attend_reads(
        query, key_pool, value_pool, reads, scale=scale, softcap=softcap, sinks=sinks
    )
