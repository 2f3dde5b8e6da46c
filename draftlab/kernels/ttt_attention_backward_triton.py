"""Triton kernels of the backward pass of `ttt_attention.py`; `ttt_attention_triton.py` derives it.

Gradients of the output come contiguous, [B, R, heads, head_dim], as do all gradients that leave.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.ttt_attention_triton import (
    BEYOND,
    RAGGED,
    _bounds,
    _key_tiles,
    _load_tile,
    _of_steps,
    _own_tile,
    _packed_rows,
    _store_tile,
)


@triton.jit(do_not_specialize=RAGGED)
def delta_kernel(
    output, d_output, delta, num_packed,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Δ = Σ dO · O of each row and head; `num_packed` of them."""
    packed = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = packed < num_packed
    o = _load_tile(output + packed * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    d_o = _load_tile(d_output + packed * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    tl.store(delta + packed, tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1), real)


@triton.jit
def _weights_and_scores(q, k, v, d_o, seen, lse, delta, scale, PRECISION: tl.constexpr):
    """Softmax weights p and gradients dS [rows, keys] of a tile, in the inputs' dtype."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    p = tl.exp2(score * scale - lse[:, None])
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
    return p.to(q.dtype), (p * (d_p - delta[:, None])).to(q.dtype)


@triton.jit(do_not_specialize=RAGGED)
def rows_kernel(
    query, key, value, own_keys, own_values, own_rows, index, starts, d_output, lse, delta, d_query,
    scale, scale_log2, num_rows, num_steps,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ. One program a tile of rows; grid [kv heads, B, tiles]."""
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * TOKENS
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    row, head, real = _packed_rows(first, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS)
    first_seen, last_seen = _bounds(index, starts, row, num_rows)
    begin, count, whole = _key_tiles(first_seen, last_seen, KEYS)
    at = query + batch * query_batch + row.to(tl.int64) * query_row + head * query_head
    q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
    place = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
    d_o = _load_tile(d_output + place * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    top = tl.load(lse + place, real, other=float("inf"))
    d_top = tl.load(delta + place, real, other=0.0)

    d_q = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    for tile in range(tl.cdiv(num_steps * TOKENS, KEYS)):
        step, own, token, there = _own_tile(
            tile, first, batch, index, starts, own_rows, num_steps, num_rows, TOKENS, KEYS
        )
        offset = (own * KV_HEADS + kv_head) * HEAD_DIM
        at_key = _of_steps(own_keys, step, offset, STEPS)
        at_value = _of_steps(own_values, step, offset, STEPS)
        k = _load_tile(at_key, there, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(at_value, there, HEAD_DIM, HEAD_DIM_PADDED)
        seen = ((row - first)[:, None] == token[None, :]) & there[None, :]
        _, d_s = _weights_and_scores(q, k, v, d_o, seen, top, d_top, scale_log2, PRECISION)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)

    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    for tile in range(whole, count):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        read = j <= tl.max(last_seen, 0)
        k = _load_tile(key + j.to(tl.int64) * key_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        seen = (first_seen[:, None] <= j[None, :]) & (j[None, :] <= last_seen[:, None])
        _, d_s = _weights_and_scores(q, k, v, d_o, seen, top, d_top, scale_log2, PRECISION)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)
    for tile in range(whole):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        k = _load_tile(key + j.to(tl.int64) * key_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        _, d_s = _weights_and_scores(q, k, v, d_o, None, top, d_top, scale_log2, PRECISION)
        d_q = tl.dot(d_s, k, d_q, input_precision=PRECISION)
    _store_tile(d_query + place * HEAD_DIM, d_q * scale, real, HEAD_DIM, HEAD_DIM_PADDED)


@triton.jit(do_not_specialize=RAGGED)
def own_kernel(
    query, own_keys, own_values, own_rows, index, starts, d_output, lse, delta,
    d_own_keys, d_own_values,
    scale, scale_log2, num_rows, num_steps,
    query_batch, query_row, query_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of own keys. One program a tile of rows; grid [kv heads, B, tiles].

    Not part of `rows_kernel`, which would not fit the registers and have larger tiles.
    """
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    first = tl.program_id(2) * TOKENS
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    row, head, real = _packed_rows(first, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS)
    at = query + batch * query_batch + row.to(tl.int64) * query_row + head * query_head
    q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
    place = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
    d_o = _load_tile(d_output + place * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
    top = tl.load(lse + place, real, other=float("inf"))
    d_top = tl.load(delta + place, real, other=0.0)
    for tile in range(tl.cdiv(num_steps * TOKENS, KEYS)):
        step, own, token, there = _own_tile(
            tile, first, batch, index, starts, own_rows, num_steps, num_rows, TOKENS, KEYS
        )
        offset = (own * KV_HEADS + kv_head) * HEAD_DIM
        at_key = _of_steps(own_keys, step, offset, STEPS)
        at_value = _of_steps(own_values, step, offset, STEPS)
        k = _load_tile(at_key, there, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(at_value, there, HEAD_DIM, HEAD_DIM_PADDED)
        seen = ((row - first)[:, None] == token[None, :]) & there[None, :]
        p, d_s = _weights_and_scores(q, k, v, d_o, seen, top, d_top, scale_log2, PRECISION)
        d_k = tl.dot(tl.trans(d_s), q, input_precision=PRECISION) * scale
        at_d_key = _of_steps(d_own_keys, step, offset, STEPS)
        _store_tile(at_d_key, d_k, there, HEAD_DIM, HEAD_DIM_PADDED)
        d_v = tl.dot(tl.trans(p), d_o, input_precision=PRECISION)
        at_d_value = _of_steps(d_own_values, step, offset, STEPS)
        _store_tile(at_d_value, d_v, there, HEAD_DIM, HEAD_DIM_PADDED)


@triton.jit
def _rows_that_see(index, starts, num_rows, low, high, TOKENS: tl.constexpr, SCAN: tl.constexpr):
    """Which rows see any of the keys low … high.

    All of them are looked at, since that costs little beside attending to them.

    Returns:
        first, count: the first row, and how many tiles of rows there are from it on.
        whole_from, whole_to: tiles of rows that see all of these keys.
    """
    first, end = BEYOND, 0
    whole_first, whole_end = BEYOND, num_rows  # the first run of rows that see all
    for chunk in range(0, num_rows, SCAN):
        row = chunk + tl.arange(0, SCAN)
        first_seen, last_seen = _bounds(index, starts, row, num_rows)
        row = tl.minimum(row, num_rows - 1)
        sees = (first_seen <= high) & (last_seen >= low)
        first = tl.minimum(first, tl.min(tl.where(sees, row, BEYOND), 0))
        end = tl.maximum(end, tl.max(tl.where(sees, row + 1, 0), 0))
        whole = (first_seen <= low) & (last_seen >= high)
        whole_first = tl.minimum(whole_first, tl.min(tl.where(whole, row, BEYOND), 0))
        after = (row > whole_first) & (whole == 0)
        whole_end = tl.minimum(whole_end, tl.min(tl.where(after, row, BEYOND), 0))
    count = tl.where(end > 0, tl.cdiv(end - first, TOKENS), 0)
    whole_from = tl.minimum(tl.cdiv(whole_first - first, TOKENS), count)
    whole_to = tl.minimum((whole_end - first) // TOKENS, count)
    return first, count, whole_from, tl.maximum(whole_to, whole_from)


@triton.jit
def _take_in(q, d_o, k, v, seen, top, d_top, d_k, d_v, scale, PRECISION: tl.constexpr):
    """Adds what a tile of rows gives to the gradients of a tile of keys; seen: [keys, rows]."""
    score = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p = tl.exp2(score * scale - top[None, :])
    if seen is not None:
        p = tl.where(seen, p, 0.0)
    d_v = tl.dot(p.to(q.dtype), d_o, d_v, input_precision=PRECISION)
    d_p = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
    d_s = (p * (d_p - d_top[None, :])).to(q.dtype)
    return tl.dot(d_s, q, d_k, input_precision=PRECISION), d_v


@triton.jit(do_not_specialize=RAGGED)
def keys_kernel(
    query, key, value, index, starts, d_output, lse, delta, d_key, d_value,
    scale, scale_log2, num_rows, num_keys,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SCAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of step-0 keys. One program a tile of keys; grid [kv heads, B, tiles]."""
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    low = tl.program_id(2) * KEYS  # the first keys are seen by most rows, and start first
    high = tl.minimum(low + KEYS, num_keys) - 1
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    first, count, whole_from, whole_to = _rows_that_see(
        index, starts, num_rows, low, high, TOKENS, SCAN
    )
    j = low + tl.arange(0, KEYS)
    at_key = key + batch * key_batch + j.to(tl.int64) * key_row + kv_head * key_head
    at_value = value + batch * value_batch + j.to(tl.int64) * value_row + kv_head * value_head
    k = _load_tile(at_key, j <= high, HEAD_DIM, HEAD_DIM_PADDED)
    v = _load_tile(at_value, j <= high, HEAD_DIM, HEAD_DIM_PADDED)

    query += batch * query_batch
    d_k = tl.zeros([KEYS, HEAD_DIM_PADDED], tl.float32)
    d_v = tl.zeros([KEYS, HEAD_DIM_PADDED], tl.float32)
    for edge in range(count - whole_to + whole_from):
        tile = tl.where(edge < whole_from, edge, edge - whole_from + whole_to)
        row, head, real = _packed_rows(
            first + tile * TOKENS, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS
        )
        first_seen, last_seen = _bounds(index, starts, row, num_rows)
        place = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
        at = query + row.to(tl.int64) * query_row + head * query_head
        q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
        d_o = _load_tile(d_output + place * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
        top = tl.load(lse + place, real, other=float("inf"))
        d_top = tl.load(delta + place, real, other=0.0)
        seen = (first_seen[None, :] <= j[:, None]) & (j[:, None] <= last_seen[None, :])
        d_k, d_v = _take_in(q, d_o, k, v, seen, top, d_top, d_k, d_v, scale_log2, PRECISION)
    for tile in range(whole_from, whole_to):
        row, head, real = _packed_rows(
            first + tile * TOKENS, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS
        )
        place = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
        at = query + row.to(tl.int64) * query_row + head * query_head
        q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)
        d_o = _load_tile(d_output + place * HEAD_DIM, real, HEAD_DIM, HEAD_DIM_PADDED)
        top = tl.load(lse + place, real, other=float("inf"))
        d_top = tl.load(delta + place, real, other=0.0)
        d_k, d_v = _take_in(q, d_o, k, v, None, top, d_top, d_k, d_v, scale_log2, PRECISION)

    place = (batch * num_keys + j) * KV_HEADS + kv_head
    _store_tile(d_key + place * HEAD_DIM, d_k * scale, j <= high, HEAD_DIM, HEAD_DIM_PADDED)
    _store_tile(d_value + place * HEAD_DIM, d_v, j <= high, HEAD_DIM, HEAD_DIM_PADDED)
