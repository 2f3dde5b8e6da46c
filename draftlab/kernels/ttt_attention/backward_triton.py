"""Triton kernels of the backward pass of `ttt_attention/`, derived in `ttt_attention/triton.py`.

The output's gradient is contiguous, [B, R, heads, head_dim], as are all gradients written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.ttt_attention.triton import (
    BEYOND,
    UNSPECIALIZED,
    _bounds,
    _key_tiles,
    _load_tile,
    _packed_rows,
    _row_tile,
    _step_key_tile,
    _step_pointers,
    _store_tile,
)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(
    output, d_output, delta, num_packed,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute Δ = Σ dO · O of each row and head; there are `num_packed`."""
    packed = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = packed < num_packed
    o = _load_tile(output + packed * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    d_o = _load_tile(d_output + packed * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(delta + packed, tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1), real)


@triton.jit
def _weights_and_scores(q, k, v, d_o, visible, lse, delta, scale, PRECISION: tl.constexpr):
    """Return softmax weights p and gradients dS [rows, keys] of a tile, in the inputs' dtype."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(score * scale - lse[:, None])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
    return p.to(q.dtype), (p * (d_p - delta[:, None])).to(q.dtype)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def d_query_kernel(
    query, key, value, step_keys, step_values, step_rows, index, starts, segments, d_output,
    lse, delta, d_query, scale, scale_log2, num_rows, num_steps, num_segments,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one tile of rows; grid [kv heads, B, tiles]."""
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    first, end, steps = _row_tile(
        tl.num_programs(2) - 1 - tl.program_id(2),
        segments, num_segments, num_rows, num_steps, TOKENS,
    )  # fmt: skip
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    row, head, real = _packed_rows(first, kv_head, end, GROUP, GROUP_PADDED, ROWS)
    first_seen, last_seen = _bounds(index, starts, row, end)
    begin, count, full = _key_tiles(first_seen, last_seen, KEYS)
    at = query + batch * query_batch + row.to(tl.int64) * query_row + head * query_head
    q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
    at_row = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
    d_o = _load_tile(d_output + at_row * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    top = tl.load(lse + at_row, real, other=float("inf"))
    d_top = tl.load(delta + at_row, real, other=0.0)

    d_q = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    for tile in range(tl.cdiv(steps * TOKENS, KEYS)):
        step, step_row, token, exists = _step_key_tile(
            tile, first, end, batch, index, starts, step_rows, steps, num_rows, TOKENS, KEYS
        )
        offset = (step_row * KV_HEADS + kv_head) * HEAD_DIM
        at_key = _step_pointers(step_keys, step, offset, STEPS)
        at_value = _step_pointers(step_values, step, offset, STEPS)
        k = _load_tile(at_key, exists, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(at_value, exists, HEAD_DIM, HEAD_DIM_PADDED)
        visible = ((row - first)[:, None] == token[None, :]) & exists[None, :]
        _, d_s = _weights_and_scores(q, k, v, d_o, visible, top, d_top, scale_log2, PRECISION)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)

    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    for tile in range(full, count):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        read = j <= tl.max(last_seen, 0)
        k = _load_tile(key + j.to(tl.int64) * key_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        visible = (first_seen[:, None] <= j[None, :]) & (j[None, :] <= last_seen[:, None])
        _, d_s = _weights_and_scores(q, k, v, d_o, visible, top, d_top, scale_log2, PRECISION)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)
    for tile in range(full):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        k = _load_tile(key + j.to(tl.int64) * key_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        _, d_s = _weights_and_scores(q, k, v, d_o, None, top, d_top, scale_log2, PRECISION)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)
    _store_tile(d_query + at_row * HEAD_DIM, d_q * scale, real, HEAD_DIM, HEAD_DIM_PADDED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def d_step_keys_kernel(
    query, step_keys, step_values, step_rows, index, starts, d_output, lse, delta,
    d_step_keys, d_step_values,
    scale, scale_log2, num_rows, num_steps,
    query_batch, query_row, query_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of step keys for one tile of rows; grid [kv heads, B, tiles].

    It is apart from `d_query_kernel`, which has larger tiles and would need too many registers.
    """
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    first = tl.program_id(2) * TOKENS
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    row, head, real = _packed_rows(first, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS)
    at = query + batch * query_batch + row.to(tl.int64) * query_row + head * query_head
    q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
    at_row = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
    d_o = _load_tile(d_output + at_row * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    top = tl.load(lse + at_row, real, other=float("inf"))
    d_top = tl.load(delta + at_row, real, other=0.0)
    for tile in range(tl.cdiv(num_steps * TOKENS, KEYS)):
        step, step_row, token, exists = _step_key_tile(
            tile,
            first,
            num_rows,
            batch,
            index,
            starts,
            step_rows,
            num_steps,
            num_rows,
            TOKENS,
            KEYS,
        )
        offset = (step_row * KV_HEADS + kv_head) * HEAD_DIM
        at_key = _step_pointers(step_keys, step, offset, STEPS)
        at_value = _step_pointers(step_values, step, offset, STEPS)
        k = _load_tile(at_key, exists, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(at_value, exists, HEAD_DIM, HEAD_DIM_PADDED)
        visible = ((row - first)[:, None] == token[None, :]) & exists[None, :]
        p, d_s = _weights_and_scores(q, k, v, d_o, visible, top, d_top, scale_log2, PRECISION)
        d_k = tl.dot(tl.trans(d_s), q, input_precision=PRECISION) * scale
        at_d_key = _step_pointers(d_step_keys, step, offset, STEPS)
        _store_tile(at_d_key, d_k, exists, HEAD_DIM, HEAD_DIM_PADDED)
        d_v = tl.dot(tl.trans(p), d_o, input_precision=PRECISION)
        at_d_value = _step_pointers(d_step_values, step, offset, STEPS)
        _store_tile(at_d_value, d_v, exists, HEAD_DIM, HEAD_DIM_PADDED)


@triton.jit
def _visible_rows(index, starts, begin, stop, low, high, TOKENS: tl.constexpr, SCAN: tl.constexpr):
    """Return which of the rows from `begin` to `stop` see any of the keys low … high.

    All are scanned, which costs little compared with attention.

    Returns:
        first, count: the first row, and the number of tiles of rows from it on.
        full_from, full_to: tiles of rows that see all of these keys.
    """
    first, end = BEYOND, 0
    full_first, full_end = BEYOND, stop  # the first run of rows that see all
    for chunk in range(begin, stop, SCAN):
        row = chunk + tl.arange(0, SCAN)
        first_seen, last_seen = _bounds(index, starts, row, stop)
        row = tl.minimum(row, stop - 1)
        sees = (first_seen <= high) & (last_seen >= low)
        first = tl.minimum(first, tl.min(tl.where(sees, row, BEYOND), 0))
        end = tl.maximum(end, tl.max(tl.where(sees, row + 1, 0), 0))
        full = (first_seen <= low) & (last_seen >= high)
        full_first = tl.minimum(full_first, tl.min(tl.where(full, row, BEYOND), 0))
        after = (row > full_first) & (full == 0)
        full_end = tl.minimum(full_end, tl.min(tl.where(after, row, BEYOND), 0))
    count = tl.where(end > 0, tl.cdiv(end - first, TOKENS), 0)
    full_from = tl.minimum(tl.cdiv(full_first - first, TOKENS), count)
    full_to = tl.minimum((full_end - first) // TOKENS, count)
    return first, count, full_from, tl.maximum(full_to, full_from)


@triton.jit
def _add_rows(q, d_o, k, v, visible, top, d_top, d_k, d_v, scale, PRECISION: tl.constexpr):
    """Add a tile of rows to the gradients of a tile of keys; visible: [keys, rows]."""
    score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.exp2(score * scale - top[None, :])
    if visible is not None:
        p = tl.where(visible, p, 0.0)
    d_v = tl.dot(p.to(q.dtype), d_o, d_v, input_precision=PRECISION)
    d_p = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
    d_s = (p * (d_p - d_top[None, :])).to(q.dtype)
    return tl.dot(d_s, q, d_k, input_precision=PRECISION), d_v


@triton.jit(do_not_specialize=UNSPECIALIZED)
def d_keys_kernel(
    query, key, value, index, starts, segments, d_output, lse, delta, d_key, d_value,
    scale, scale_log2, num_rows, num_keys, num_segments,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SCAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one tile of step-0 keys; grid [kv heads, B, tiles]."""
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    low = tl.program_id(2) * KEYS  # the first keys, which most rows see, start first
    high = tl.minimum(low + KEYS, num_keys) - 1
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    j = low + tl.arange(0, KEYS)
    at_key = key + batch * key_batch + j.to(tl.int64) * key_row + kv_head * key_head
    at_value = value + batch * value_batch + j.to(tl.int64) * value_row + kv_head * value_head
    k = _load_tile(at_key, j <= high, HEAD_DIM, HEAD_DIM_PADDED)
    v = _load_tile(at_value, j <= high, HEAD_DIM, HEAD_DIM_PADDED)

    query += batch * query_batch
    d_k = tl.zeros([KEYS, HEAD_DIM_PADDED], tl.float32)
    d_v = tl.zeros([KEYS, HEAD_DIM_PADDED], tl.float32)
    for segment in range(num_segments):  # of `_row_tile`; in each one, slots of rows ascend
        begin, stop = 0, num_rows
        if segments is not None:
            begin = tl.load(segments + segment).to(tl.int32)
            stop = tl.load(segments + segment + 1).to(tl.int32)
        first, count, full_from, full_to = _visible_rows(
            index, starts, begin, stop, low, high, TOKENS, SCAN
        )
        for edge in range(count - full_to + full_from):
            tile = tl.where(edge < full_from, edge, edge - full_from + full_to)
            row, head, real = _packed_rows(
                first + tile * TOKENS, kv_head, stop, GROUP, GROUP_PADDED, ROWS
            )
            first_seen, last_seen = _bounds(index, starts, row, stop)
            at_row = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
            at = query + row.to(tl.int64) * query_row + head * query_head
            q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
            d_o = _load_tile(d_output + at_row * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
            top = tl.load(lse + at_row, real, other=float("inf"))
            d_top = tl.load(delta + at_row, real, other=0.0)
            visible = (first_seen[None, :] <= j[:, None]) & (j[:, None] <= last_seen[None, :])
            d_k, d_v = _add_rows(q, d_o, k, v, visible, top, d_top, d_k, d_v, scale_log2, PRECISION)
        for tile in range(full_from, full_to):
            row, head, real = _packed_rows(
                first + tile * TOKENS, kv_head, stop, GROUP, GROUP_PADDED, ROWS
            )
            at_row = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
            at = query + row.to(tl.int64) * query_row + head * query_head
            q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
            d_o = _load_tile(d_output + at_row * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
            top = tl.load(lse + at_row, real, other=float("inf"))
            d_top = tl.load(delta + at_row, real, other=0.0)
            d_k, d_v = _add_rows(q, d_o, k, v, None, top, d_top, d_k, d_v, scale_log2, PRECISION)

    at_row = (batch * num_keys + j) * KV_HEADS + kv_head
    _store_tile(d_key + at_row * HEAD_DIM, d_k * scale, j <= high, HEAD_DIM, HEAD_DIM_PADDED)
    _store_tile(d_value + at_row * HEAD_DIM, d_v, j <= high, HEAD_DIM, HEAD_DIM_PADDED)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def d_slot_keys_kernel(
    query, slot_key, slot_value, readers, d_output, lse, delta, d_slot_key, d_slot_value,
    scale, scale_log2, num_rows, num_slots, num_depths,
    query_batch, query_row, query_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of a tile of slots; grid [kv heads, tiles].

    At most one row of each depth reads a slot. Scores are therefore sums over a row's channels, and
    not products of tiles.
    """
    kv_head = tl.program_id(0)
    slot = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    exists = slot < num_slots
    offset = (slot.to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM
    k = _load_tile(slot_key + offset, exists, HEAD_DIM, HEAD_DIM_PADDED).to(tl.float32)
    v = _load_tile(slot_value + offset, exists, HEAD_DIM, HEAD_DIM_PADDED).to(tl.float32)
    d_k = tl.zeros([SLOTS, HEAD_DIM_PADDED], tl.float32)
    d_v = tl.zeros([SLOTS, HEAD_DIM_PADDED], tl.float32)
    for _ in range(num_depths):
        flat = tl.load(readers + slot, exists, other=-1)
        real = flat >= 0
        at_query = query + (flat // num_rows) * query_batch + (flat % num_rows) * query_row
        for member in range(GROUP):
            head = kv_head * GROUP + member
            q = _load_tile(at_query + head * query_head, real, HEAD_DIM, HEAD_DIM_PADDED)
            at_row = flat * (KV_HEADS * GROUP) + head
            d_o = _load_tile(d_output + at_row * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
            q, d_o = q.to(tl.float32), d_o.to(tl.float32)
            score = tl.sum(q * k, 1) * scale_log2
            p = tl.exp2(score - tl.load(lse + at_row, real, other=float("inf")))
            d_v += p[:, None] * d_o
            d_s = p * (tl.sum(d_o * v, 1) - tl.load(delta + at_row, real, other=0.0))
            d_k += d_s[:, None] * q
        readers += num_slots
    _store_tile(d_slot_key + offset, d_k * scale, exists, HEAD_DIM, HEAD_DIM_PADDED)
    _store_tile(d_slot_value + offset, d_v, exists, HEAD_DIM, HEAD_DIM_PADDED)
