"""The eager reference of paged attention: plan which keys rows read and write, then do it.

The plan is the same in every layer with the same window, so a decode pass makes it once
(`PagedCache.reads`) and a layer costs little more than its attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def check_heads(query: Tensor, key: Tensor) -> None:
    """Raise ValueError if the query heads [.., .., heads, ..] are no multiple of the kv heads."""
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{query.shape[2]} query heads cannot share {key.shape[2]} kv heads evenly"
        )


Writes = tuple[Tensor, Tensor | None]
"""The slots that T new tokens are written to, the same in every layer: slots int64 [W], none of
them −1, and int64 [W], the token that goes to each; None: all, in order."""


def plan_writes(slots: Tensor) -> Writes:
    """Return the writes to slots int64 [B, M], where −1 writes nothing."""
    slots = slots.flatten()
    real = slots >= 0
    if bool(real.all()):
        return slots, None
    tokens = real.nonzero().squeeze(1)
    return slots.index_select(0, tokens), tokens


def write_rows(
    key: Tensor, value: Tensor, key_pool: Tensor, value_pool: Tensor, writes: Writes
) -> None:
    """Write keys and values [T, kv heads, head_dim] to the pools by a plan."""
    slots, tokens = writes
    if tokens is not None:
        key, value = (new.index_select(0, tokens) for new in (key, value))
    # Views, because a reshape might write to a copy of the pool.
    shape = -1, *key.shape[1:]
    key_pool.view(shape).index_copy_(0, slots, key)
    value_pool.view(shape).index_copy_(0, slots, value)


@dataclass(frozen=True)
class Read:
    """The keys that the new tokens of one row read, the same in every layer with the same window.

    Attributes:
        row: the row of the batch.
        count: the row's real tokens, which come first.
        blocks: the block that holds all of its keys, or int32 [n], the blocks that it reads.
        keys: the keys' positions in that block, or in the concatenated blocks.
        mask: added to the scores, [count · group, keys]; None where all tokens see all keys.
    """

    row: int
    count: int
    blocks: int | Tensor
    keys: slice
    mask: Tensor | None


def plan_reads(
    block_table: Tensor,
    positions: Tensor,
    block_size: int,
    group: int,
    dtype: torch.dtype,
    *,
    window: int | None = None,
    chunk: int | None = None,
    last_seen: Tensor | None = None,
) -> list[Read]:
    """Return what each row with real tokens reads.

    Args:
        block_table, positions, window, chunk, last_seen: as in `attend_paged`.
        block_size: positions in a block.
        group: query heads of a kv head.
        dtype: of the masks, equal to the queries'.
    """
    reads = []
    tables = block_table.tolist() if block_table.shape[1] == 1 else None
    last_keys = positions if last_seen is None else last_seen
    for b, (row, last_row) in enumerate(zip(positions.tolist(), last_keys.tolist(), strict=True)):
        count = sum(position >= 0 for position in row)
        if not count:
            continue
        last, low = max(last_row[:count]), _lowest(row[0], window, chunk)
        if tables:
            blocks, start = tables[b][0], low
        else:
            blocks = block_table[b, low // block_size : last // block_size + 1]
            start = low % block_size
        mask = None
        bounded = window is not None or chunk is not None
        if last_row[0] < last or (bounded and count > 1):
            keys = torch.arange(low, last + 1, device=positions.device)
            queries, seen = positions[b, :count, None], last_keys[b, :count, None]
            mask = _mask(keys, queries, seen, window, chunk, dtype).repeat_interleave(group, 0)
        reads.append(Read(b, count, blocks, slice(start, start + last + 1 - low), mask))
    return reads


def attend_reads(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    reads: list[Read],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return `attend_paged` by a plan of reads."""
    num_rows, num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_pool.shape[2]
    group = num_heads // num_kv_heads
    # The queries that share a kv head are adjacent: [B, kv heads, tokens · group, head_dim].
    if num_tokens == 1:
        grouped = query.reshape(num_rows, num_kv_heads, group, head_dim)
    else:
        shape = num_rows, num_tokens, num_kv_heads, group, head_dim
        grouped = query.reshape(shape).transpose(1, 2).flatten(2, 3)
    queries = grouped.split(1)
    attended = []
    for read in reads:
        row, blocks = queries[read.row], read.blocks
        if read.count < num_tokens:
            row = row[:, :, : read.count * group]
        if isinstance(blocks, int):
            key = key_pool[blocks : blocks + 1, read.keys]
            value = value_pool[blocks : blocks + 1, read.keys]
        else:
            key, value = (p[blocks].flatten(0, 1)[None, read.keys] for p in (key_pool, value_pool))
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        attended.append(_attend(row, key, value, read.mask, scale, softcap, sinks))
    if len(reads) == num_rows and all(read.count == num_tokens for read in reads):
        output = attended[0] if num_rows == 1 else torch.cat(attended)
    else:
        output = torch.zeros_like(grouped, memory_format=torch.contiguous_format)
        for read, part in zip(reads, attended, strict=True):
            output[read.row, :, : read.count * group] = part[0]
    if num_tokens > 1:
        output = output.view(num_rows, num_kv_heads, num_tokens, group, head_dim).transpose(1, 2)
    return output.reshape(query.shape).contiguous()


def _lowest(position: int, window: int | None, chunk: int | None) -> int:
    """Return the first key that a query at `position` sees."""
    by_window = 0 if window is None else position - window + 1
    by_chunk = 0 if chunk is None else position // chunk * chunk
    return max(0, by_window, by_chunk)


def _mask(
    keys: Tensor,
    queries: Tensor,
    last_seen: Tensor,
    window: int | None,
    chunk: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the additive mask [count, keys] of queries at positions [count, 1]: 0 or −inf."""
    visible = keys <= last_seen
    if window is not None:
        visible &= keys > queries - window
    if chunk is not None:
        visible &= keys >= queries // chunk * chunk
    mask = torch.zeros(visible.shape, dtype=dtype, device=keys.device)
    return mask.masked_fill_(~visible, float("-inf"))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return SDPA's result, written out for capped scores and sinks, which SDPA lacks."""
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
