"""Attention over a paged key-value cache: write new keys by slot, attend by block table.

A pool [P, S, kv heads, head_dim] holds P blocks of S positions. The key of position j of row b lies
at `pool[block_table[b, j // S], j % S]`; its slot is `block · S + offset`. This file is the eager
reference and the entry point; `paged_attention_triton.py` does the same on a GPU without ever
asking the device for a number, so that it can be captured in a CUDA graph.

On a CPU the usual cache has one block a row: its keys are then read in place, as a view.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


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

    Returns:
        [B, M, heads, head_dim] in the query's dtype, contiguous.

    Raises:
        ValueError: when the heads are no multiple of the kv heads.
    """
    if query.shape[2] % key_pool.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads cannot share {key_pool.shape[2]} kv heads evenly"
        )
    if query.is_cuda:
        from draftlab.kernels.paged_attention_launch import attend_paged_triton as attend
    else:
        attend = attend_paged_reference
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
    slots, key, value = slots.flatten(), key.flatten(0, 1), value.flatten(0, 1)
    real = slots >= 0
    if not real.all():
        kept = real.nonzero().squeeze(1)
        slots, key, value = (x.index_select(0, kept) for x in (slots, key, value))
    # A view, not a reshape: of pools that cannot be viewed so, a copy would be written to.
    for pool, new in ((key_pool, key), (value_pool, value)):
        pool.view(-1, *pool.shape[2:]).index_copy_(0, slots, new)


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
    num_rows, num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_pool.shape[1:3]
    group = num_heads // num_kv_heads
    # The queries that share a kv head side by side: [B, kv heads, tokens · group, head_dim].
    shape = num_rows, num_tokens, num_kv_heads, group, head_dim
    grouped = query.reshape(shape).transpose(1, 2).flatten(2, 3)
    output = torch.zeros_like(grouped, memory_format=torch.contiguous_format)
    tables = block_table.tolist() if block_table.shape[1] == 1 else None
    for b, row in enumerate(positions.tolist()):
        count = sum(position >= 0 for position in row)
        if not count:
            continue
        first, low = row[0], _lowest(row[0], window, chunk)
        if tables:
            key, value = (
                pool[tables[b][0], low : first + count] for pool in (key_pool, value_pool)
            )
        else:
            blocks = block_table[b, low // block_size : (first + count - 1) // block_size + 1]
            start = low % block_size
            keys = slice(start, start + first + count - low)
            key, value = (pool[blocks].flatten(0, 1)[keys] for pool in (key_pool, value_pool))
        mask = None
        if count > 1:
            # Masks are the same in every layer; those of prefill are large and soon outdated.
            make_mask = _mask if count <= 32 else _mask.__wrapped__
            mask = make_mask(first, count, low, group, window, chunk, query.dtype, query.device)
        # [1, kv heads, keys or tokens · group, head_dim]
        rows = slice(b, b + 1), slice(None), slice(count * group)
        attended = _attend(
            grouped[rows],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            mask,
            scale,
            softcap,
            sinks,
        )
        output[rows] = attended
    output = output.unflatten(2, (num_tokens, group)).transpose(1, 2)
    return output.reshape(query.shape).contiguous()


def _lowest(position: int, window: int | None, chunk: int | None) -> int:
    """The first key that a query at `position` sees."""
    by_window = 0 if window is None else position - window + 1
    by_chunk = 0 if chunk is None else position // chunk * chunk
    return max(0, by_window, by_chunk)


@lru_cache(maxsize=64)
def _mask(
    first: int,
    count: int,
    low: int,
    group: int,
    window: int | None,
    chunk: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """What to add to the scores, [count · group, first + count − low]: 0 where seen, else −inf."""
    queries = torch.arange(first, first + count, device=device)[:, None]
    keys = torch.arange(low, first + count, device=device)
    seen = keys <= queries
    if window is not None:
        seen &= keys > queries - window
    if chunk is not None:
        seen &= keys >= queries // chunk * chunk
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return mask.repeat_interleave(group, 0)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """SDPA; written out for what it lacks, capped scores and sinks. Shapes as it takes them."""
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = (query @ key.mT).float() * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        # [heads] → [1, kv heads, tokens · group, 1]: one more column, dropped after the softmax.
        num_kv_heads, rows = scores.shape[1:3]
        column = sinks.float().view(num_kv_heads, -1)
        column = column.repeat(1, rows // column.shape[1])[None, :, :, None]
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights.to(value.dtype) @ value
