"""Triton kernels of `ttt_attention.py`, forward and backward.

A program packs the query heads that share a kv head with a few neighbouring rows into one tile:
packed row p is query head p % GROUP_PADDED of row `first + p // GROUP_PADDED`. Keys stream by in
tiles. Because rows are sorted by slot and documents contiguous, most key tiles are seen whole by
the rows of a tile: only those at the edges (where documents begin, and on the diagonal) are masked.

Own keys are tiles too: the keys of TOKENS rows and KEYS / TOKENS steps side by side, gathered, each
seen by the packed rows of its own row alone. Tensor cores then do for them what they do for others,
and in the backward pass sum over the heads that share a key. With a group of four, a step costs as
much as 32 more keys.

Backward, with softmax weights p, Δ = Σ dO · O and dS = p · (dO · V − Δ) (FlashAttention-2, §3.1.2):
dQ = dS · K takes a tile of rows, dK = dSᵀ · Q and dV = pᵀ · dO a tile of keys and all rows that see
it. No atomics: the same inputs give the same bits. An own key is seen by one row, so the tile of
that row has its whole gradient. Scores are kept in powers of two (2^x is one instruction).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BEYOND = tl.constexpr(1 << 30)  # a slot or row after all others

# Numbers that change from batch to batch must not lead to kernels of their own.
RAGGED = ["num_rows", "num_keys", "num_steps", "num_packed"]


@triton.jit
def _bounds(index, starts, row, num_rows):
    """First and last slot that each row sees; (BEYOND, −1) of padding. Rows past the last: as it.

    index, starts are those of one row of the batch.
    """
    row = tl.minimum(row, num_rows - 1)
    first, last = tl.load(starts + row).to(tl.int32), tl.load(index + row).to(tl.int32)
    return tl.where(first <= last, first, BEYOND), tl.where(first <= last, last, -1)


@triton.jit
def _packed_rows(first, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS: tl.constexpr):
    """Row and query head [ROWS] of a tile's packed rows, and which of them there are."""
    packed = tl.arange(0, ROWS)
    row, member = first + packed // GROUP_PADDED, packed % GROUP_PADDED
    return row, kv_head * GROUP + member, (row < num_rows) & (member < GROUP)


@triton.jit
def _load_tile(pointers, real, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """[N, HEAD_DIM_PADDED] at pointers [N], with zeros where not `real`; None: all are."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    places = pointers[:, None] + dim[None, :]
    if HEAD_DIM == HEAD_DIM_PADDED and real is None:
        tile = tl.load(places)
    elif HEAD_DIM == HEAD_DIM_PADDED:
        tile = tl.load(places, real[:, None], other=0.0)
    elif real is None:
        tile = tl.load(places, (dim < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(places, real[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def _store_tile(pointers, tile, real, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Stores [N, HEAD_DIM_PADDED] at pointers [N]."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    mask = real[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointers[:, None] + dim[None, :], tile.to(pointers.dtype.element_ty), mask)


@triton.jit
def _key_tiles(first_seen, last_seen, KEYS: tl.constexpr):
    """Which keys the rows of a tile see together.

    Rows of two documents have no key in common; rows of one see alike up to the first row's slot.

    Returns:
        begin, count: the first key, and how many tiles there are from it on.
        whole: how many of these tiles, the first ones, all rows see whole.
    """
    begin, end = tl.min(first_seen, 0), tl.max(last_seen, 0) + 1
    count = tl.where(end > 0, tl.cdiv(end - begin, KEYS), 0)
    common = tl.where(tl.max(first_seen, 0) == begin, tl.min(last_seen, 0) + 1 - begin, 0)
    return begin, count, tl.maximum(common, 0) // KEYS


@triton.jit
def _own_tile(
    tile, first, batch, index, starts, own_rows, num_steps, num_rows,
    TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The own keys of a tile: key n is the one that row `first + n % TOKENS` made in a step.

    Returns:
        step [KEYS] (0: the unroll's first), place (the key's flat row in that step), packed token
        n % TOKENS, and which of the keys there are.
    """
    number = tile * KEYS + tl.arange(0, KEYS)
    step, token = number // TOKENS, number % TOKENS
    row = first + token
    _, last_seen = _bounds(index, starts, row, num_rows)
    real = (step < num_steps) & (row < num_rows) & (last_seen >= 0)
    line = step.to(tl.int64) * tl.num_programs(1) + batch  # of own_rows [steps · B, R]
    return step, tl.load(own_rows + line * num_rows + row, real, other=0), token, real


@triton.jit
def _of_steps(tensors, step, offset, STEPS: tl.constexpr):
    """Pointers [N]: `offset` into the tensor of each one's step. There is no array of pointers."""
    pointers = tensors[0] + offset
    for other in tl.static_range(1, STEPS):
        pointers = tl.where(step == other, tensors[other] + offset, pointers)
    return pointers


@triton.jit
def _accumulate(q, k, v, seen, top, total, gathered, scale, PRECISION: tl.constexpr):
    """Online softmax: takes in a tile of keys, of which `seen` [rows, keys] are (None: all).

    top: highest score; total: Σ 2^(score − top); gathered: Σ 2^(score − top) · value.
    """
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if seen is not None:
        score = tl.where(seen, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    # A row that has seen nothing yet: −inf − −inf would be NaN.
    base = new_top if seen is None else tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weight, 1)
    gathered = tl.dot(weight.to(v.dtype), v, gathered * shrink[:, None], input_precision=PRECISION)
    return new_top, total, gathered


@triton.jit(do_not_specialize=RAGGED)
def forward_kernel(
    query, key, value, own_keys, own_values, own_rows, index, starts, output, lse,
    scale, num_rows, num_steps,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output, and log2 Σ 2^score of each row and head (+inf of padding). Grid [kv heads, B, tiles].

    scale is times log2 e. own_keys, own_values: tensors [B · R_j, kv heads, head_dim], contiguous.
    """
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    # The last rows of a document see the most keys, so they start first.
    first = (tl.num_programs(2) - 1 - tl.program_id(2)) * TOKENS
    kv_head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index, starts = index + batch * num_rows, starts + batch * num_rows
    row, head, real = _packed_rows(first, kv_head, num_rows, GROUP, GROUP_PADDED, ROWS)
    first_seen, last_seen = _bounds(index, starts, row, num_rows)
    begin, count, whole = _key_tiles(first_seen, last_seen, KEYS)
    at = query + batch * query_batch + row.to(tl.int64) * query_row + head * query_head
    q = _load_tile(at, real, HEAD_DIM, HEAD_DIM_PADDED)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    for tile in range(tl.cdiv(num_steps * TOKENS, KEYS)):
        step, place, token, there = _own_tile(
            tile, first, batch, index, starts, own_rows, num_steps, num_rows, TOKENS, KEYS
        )
        offset = (place * KV_HEADS + kv_head) * HEAD_DIM
        at_key = _of_steps(own_keys, step, offset, STEPS)
        at_value = _of_steps(own_values, step, offset, STEPS)
        k = _load_tile(at_key, there, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(at_value, there, HEAD_DIM, HEAD_DIM_PADDED)
        seen = ((row - first)[:, None] == token[None, :]) & there[None, :]
        top, total, gathered = _accumulate(q, k, v, seen, top, total, gathered, scale, PRECISION)

    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    for tile in range(whole, count):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        read = j <= tl.max(last_seen, 0)
        k = _load_tile(key + j.to(tl.int64) * key_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        seen = (first_seen[:, None] <= j[None, :]) & (j[None, :] <= last_seen[:, None])
        top, total, gathered = _accumulate(q, k, v, seen, top, total, gathered, scale, PRECISION)
    for tile in range(whole):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        k = _load_tile(key + j.to(tl.int64) * key_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        top, total, gathered = _accumulate(q, k, v, None, top, total, gathered, scale, PRECISION)

    alive = total > 0
    total = tl.where(alive, total, 1.0)
    result = gathered / total[:, None]
    place = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
    _store_tile(output + place * HEAD_DIM, result, real, HEAD_DIM, HEAD_DIM_PADDED)
    # Of padding +inf, so that 2^(score − lse) is 0 in the backward pass.
    tl.store(lse + place, tl.where(alive, top + tl.log2(total), float("inf")), real)
