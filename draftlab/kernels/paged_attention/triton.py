"""Triton kernels of `paged_attention/`.

A program takes one kv head of one row. It packs the query heads that share the kv head, of a few
neighbouring tokens, into one tile of rows, so that each key is read once for all of them, and loops
over tiles of keys with an online softmax (FlashAttention, arXiv:2205.14135; in powers of two, since
2^x is one instruction).

With few rows the GPU would be idle, so the keys of a row are split among programs (flash-decoding).
The number of splits is fixed at launch, from the shapes; the keys of a split follow from the row's
length on the device, and splits without keys exit at once. A second kernel combines the splits in
fixed order, so that the same inputs give the same bits. The kernels follow one another by
programmatic dependent launch (`launching.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.linear.triton import prefetch_share

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def write_kernel(
    key, value, key_pool, value_pool, slots, num_tokens, key_row, key_token, key_head, value_row,
    value_token, value_head, key_pool_block, key_pool_offset, key_pool_head, value_pool_block,
    value_pool_offset, value_pool_head, BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    GDC: tl.constexpr,
):  # fmt: skip
    """Write one token's keys and values; grid (tokens, B)."""
    if GDC:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row * num_tokens + token)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        head = tl.arange(0, KV_HEADS_PADDED)[:, None]
        dim = tl.arange(0, HEAD_DIM_PADDED)[None, :]
        mask = (head < KV_HEADS) & (dim < HEAD_DIM)
        new_key = tl.load(key + row * key_row + token * key_token + head * key_head + dim, mask)
        new_value = tl.load(
            value + row * value_row + token * value_token + head * value_head + dim, mask
        )
        key_at = block * key_pool_block + offset * key_pool_offset
        value_at = block * value_pool_block + offset * value_pool_offset
        tl.store(key_pool + key_at + head * key_pool_head + dim, new_key, mask)
        tl.store(value_pool + value_at + head * value_pool_head + dim, new_value, mask)


@triton.jit
def _tile_of_rows(
    positions, last_keys, at_row, tile, num_tokens,
    GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the tokens of a tile's rows [ROWS], their positions and the last keys that they see.

    Positions and keys are int32, −1 for none. last_keys: None if they are the tokens' own.

    Row r of a tile is query head r % GROUP of its kv head, of the tile's token r // GROUP.
    """
    row = tl.arange(0, ROWS)
    token = tile * (ROWS // GROUP) + row // GROUP
    real = (row < ROWS // GROUP * GROUP) & (token < num_tokens)
    position = tl.load(positions + at_row + token, mask=real, other=-1).to(tl.int32)
    seen = position
    if last_keys is not None:
        seen = tl.load(last_keys + at_row + token, mask=real, other=-1).to(tl.int32)
    return token, position, seen


@triton.jit
def _lowest(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first key that a query at `position` sees."""
    low = position * 0
    if WINDOW > 0:
        low = tl.maximum(low, position - WINDOW + 1)
    if CHUNK > 0:
        low = tl.maximum(low, position // CHUNK * CHUNK)
    return low


@triton.jit
def _key_tiles(
    position, seen, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Return which keys rows at `position`, whose last keys are `seen`, see together.

    Returns:
        Lowest and highest key (−1: none), first tile of keys, number of tiles, tiles a split.
    """
    high = tl.max(seen, 0)
    first = tl.min(tl.where(position >= 0, position, high), 0)
    low = _lowest(first, WINDOW, CHUNK)
    begin = low // KEYS
    count = tl.where(high >= 0, high // KEYS + 1 - begin, 0)
    return low, high, begin, count, (count + SPLITS - 1) // SPLITS


@triton.jit
def attend_kernel(
    query, key_pool, value_pool, block_table, positions, last_keys, sinks, output, partial,
    statistics,
    scale, softcap, prefetch_weight, prefetch_chunks, num_tokens, table_width,
    query_row, query_token, query_head,
    key_block, key_offset, key_head, value_block, value_offset, value_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    PRECISION: tl.constexpr, PREFETCH: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Attend for one tile of rows and one split; grid (kv heads, tiles · splits, B).

    PREFETCH: chunks of `prefetch_weight` that each program prefetches to L2, or 0.
    """
    if PREFETCH:
        axis = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        program = axis * tl.num_programs(0) + tl.program_id(0)
        prefetch_share(prefetch_weight, prefetch_chunks, program, PREFETCH)
    if GDC:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    # The last tiles of a prompt see the most keys, so they start first.
    split = tl.program_id(1) % SPLITS
    tile = (tl.num_programs(1) - 1 - tl.program_id(1)) // SPLITS

    token, position, seen = _tile_of_rows(
        positions, last_keys, batch * num_tokens, tile, num_tokens, GROUP, ROWS
    )
    low, high, begin, count, tiles_per_split = _key_tiles(
        position, seen, KEYS, SPLITS, WINDOW, CHUNK
    )
    end = tl.minimum(begin + (split + 1) * tiles_per_split, begin + count)
    begin += split * tiles_per_split
    if SPLITS > 1:  # noqa: SIM102 (constant at compile time; the next is not)
        if begin >= end:
            return

    row = tl.arange(0, ROWS)
    real = position >= 0
    lowest = _lowest(position, WINDOW, CHUNK)
    head = kv_head * GROUP + row % GROUP
    dim = tl.arange(0, HEAD_DIM_PADDED)
    in_dim = dim < HEAD_DIM
    query_at = batch * query_row + token.to(tl.int64) * query_token + head * query_head
    q = tl.load(
        query + query_at[:, None] + dim[None, :], real[:, None] & in_dim[None, :], other=0.0
    )

    top = tl.full([ROWS], float("-inf"), tl.float32)  # highest score, times log2 e
    total = tl.zeros([ROWS], tl.float32)  # Σ 2^(score − top)
    accumulator = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)  # Σ 2^(score − top) · value
    for key_tile in tl.range(begin, end):
        j = key_tile * KEYS + tl.arange(0, KEYS)
        valid = (j >= low) & (j <= high)
        table = block_table + batch * table_width
        if BLOCK_SIZE % KEYS == 0:
            block = tl.load(table + key_tile * KEYS // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(table + j // BLOCK_SIZE, valid, other=0).to(tl.int64)
        key_at = block * key_block + (j % BLOCK_SIZE) * key_offset + kv_head * key_head
        value_at = block * value_block + (j % BLOCK_SIZE) * value_offset + kv_head * value_head
        mask = valid[:, None] if HEAD_DIM == HEAD_DIM_PADDED else valid[:, None] & in_dim[None, :]
        k = tl.load(key_pool + key_at[:, None] + dim[None, :], mask, other=0.0)
        v = tl.load(value_pool + value_at[:, None] + dim[None, :], mask, other=0.0)

        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if softcap is not None:
            # Every GPU and the interpreter have exp2: tanh x = 1 − 2 / (e^2x + 1).
            exp_2x = tl.exp2(score * (2.0 * scale / softcap * LOG2_E))
            score = (softcap * LOG2_E) * (1.0 - 2.0 / (exp_2x + 1.0))
        else:
            score *= scale * LOG2_E
        visible = j[None, :] <= seen[:, None]
        if WINDOW > 0 or CHUNK > 0:
            visible &= j[None, :] >= lowest[:, None]
        score = tl.where(visible, score, float("-inf"))

        new_top = tl.maximum(top, tl.max(score, 1))
        # A row that has seen nothing yet: −inf − −inf would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        rescale = tl.exp2(top - base)
        total = total * rescale + tl.sum(weight, 1)
        accumulator = tl.dot(
            weight.to(v.dtype), v, accumulator * rescale[:, None], input_precision=PRECISION
        )
        top = new_top

    in_tile = (row < ROWS // GROUP * GROUP) & (token < num_tokens)
    at_output = (batch * num_tokens + token) * HEADS + head
    store = in_tile[:, None] & in_dim[None, :]
    if SPLITS > 1:
        at_output = at_output * SPLITS + split
        tl.store(partial + at_output[:, None] * HEAD_DIM + dim[None, :], accumulator, store)
        tl.store(statistics + at_output * 2, top, in_tile)
        tl.store(statistics + at_output * 2 + 1, total, in_tile)
    else:
        if sinks is not None:
            sink = tl.load(sinks + head, in_tile, other=0.0).to(tl.float32) * LOG2_E
            new_top = tl.maximum(top, sink)
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
            accumulator *= tl.exp2(top - new_top)[:, None]
        # Padding has seen nothing: accumulator is 0.
        result = accumulator / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            output + at_output[:, None] * HEAD_DIM + dim[None, :],
            result.to(output.dtype.element_ty),
            store,
        )


@triton.jit
def combine_kernel(
    positions, last_keys, sinks, output, partial, statistics, num_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPLITS: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one token's query head; grid (heads, tokens, B)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
    head, token, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # Positions may be read before the wait: they are older than the kernel that is waited for,
    # which lets this one start only after its own wait.
    tile = token // (ROWS // GROUP)
    _, position, seen = _tile_of_rows(
        positions, last_keys, batch * num_tokens, tile, num_tokens, GROUP, ROWS
    )
    _, _, _, count, tiles_per_split = _key_tiles(position, seen, KEYS, SPLITS, WINDOW, CHUNK)
    split = tl.arange(0, SPLITS)
    used = split * tiles_per_split < count
    dim = tl.arange(0, HEAD_DIM_PADDED)
    in_dim = dim < HEAD_DIM
    at_output = (batch * num_tokens + token) * HEADS + head
    if GDC:
        tl.extra.cuda.gdc_wait()
    top = tl.load(statistics + (at_output * SPLITS + split) * 2, used, other=float("-inf"))
    total = tl.load(statistics + (at_output * SPLITS + split) * 2 + 1, used, other=0.0)
    accumulator = tl.load(
        partial + (at_output * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :],
        used[:, None] & in_dim[None, :],
        other=0.0,
    )
    base = tl.max(top, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight = tl.exp2(top - base)
    denom = tl.sum(total * weight, 0)
    if sinks is not None:
        denom += tl.exp2(sink - base)
    result = tl.sum(accumulator * weight[:, None], 0) / tl.where(denom > 0, denom, 1.0)
    tl.store(output + at_output * HEAD_DIM + dim, result.to(output.dtype.element_ty), in_dim)
