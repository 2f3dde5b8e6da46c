"""Triton kernels of `ttt_attention/`: the forward pass, then the backward pass.

A program packs the query heads that share a kv head, of a few neighbouring rows, into one tile:
packed row p is query head p % GROUP_PADDED of row `first + p // GROUP_PADDED`. It loops over tiles
of keys. Because rows are sorted by slot and documents contiguous, the rows of a tile see most key
tiles in full. Only the tiles at the edges (where documents begin, and on the diagonal) are masked.

Step keys form tiles too: the keys of TOKENS rows and KEYS / TOKENS steps, gathered, each visible to
the packed rows of its own row only. Tensor cores then process them like other keys, and in the
backward pass sum over the heads that share a key. With a group of four, a step costs as much as 32
more keys.

Backward, with softmax weights p, Δ = Σ dO · O and dS = p · (dO · V − Δ) (FlashAttention-2, Dao,
arXiv:2307.08691, §3.1.2): dQ = dS · K takes a tile of rows, dK = dSᵀ · Q and dV = pᵀ · dO a tile of
keys and all rows that see it. There are no atomics, so the same inputs give the same bits. A step
key is visible to one row, so the tile of that row computes its complete gradient; several rows see
a key of parallel drafting, whose gradient is that of `d_slot_keys_kernel`. Scores are kept as
powers of two (2^x is one instruction). The output's gradient is contiguous, [B, R, heads,
head_dim], as are all gradients written.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
BEYOND = tl.constexpr(1 << 30)  # a slot or row after all others

# Numbers that change from batch to batch must not compile new kernels.
UNSPECIALIZED = [
    "num_rows", "num_keys", "num_steps", "num_packed", "num_segments", "num_slots", "num_depths"
]  # fmt: skip


@triton.jit
def _row_tile(tile, segments, num_segments, num_rows, num_steps, TOKENS: tl.constexpr):
    """Return the first row of a tile, the end of its segment, and the rows' number of step keys.

    The rows of segment n (parallel drafting: of depth n) have n step keys. segments: the first row
    of each one, and the end; None: all rows have `num_steps`.
    """
    first, end, steps = tile * TOKENS, num_rows, num_steps
    if segments is not None:
        for number in range(num_segments):
            begin = tl.load(segments + number).to(tl.int32)
            stop = tl.load(segments + number + 1).to(tl.int32)
            count = tl.cdiv(stop - begin, TOKENS)
            inside = (tile >= 0) & (tile < count)
            first = tl.where(inside, begin + tile * TOKENS, first)
            end, steps = tl.where(inside, stop, end), tl.where(inside, number, steps)
            tile -= count
    return first, end, steps


@triton.jit
def _bounds(index, starts, row, end):
    """Return the first and last slot that each row sees; (BEYOND, −1) for padding.

    Rows from `end` on repeat the one before. index and starts point to one row of the batch.
    """
    row = tl.minimum(row, end - 1)
    first, last = tl.load(starts + row).to(tl.int32), tl.load(index + row).to(tl.int32)
    return tl.where(first <= last, first, BEYOND), tl.where(first <= last, last, -1)


@triton.jit
def _packed_rows(first, kv_head, end, GROUP, GROUP_PADDED, ROWS: tl.constexpr):
    """Return row and query head [ROWS] of a tile's packed rows, and which come before `end`."""
    packed = tl.arange(0, ROWS)
    row, member = first + packed // GROUP_PADDED, packed % GROUP_PADDED
    return row, kv_head * GROUP + member, (row < end) & (member < GROUP)


@triton.jit
def _load_tile(pointers, real, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """Load [N, HEAD_DIM_PADDED] at pointers [N], zeros where not `real`; None: all are real."""
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
    """Store [N, HEAD_DIM_PADDED] at pointers [N]."""
    dim = tl.arange(0, HEAD_DIM_PADDED)
    mask = real[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(pointers[:, None] + dim[None, :], tile.to(pointers.dtype.element_ty), mask)


@triton.jit
def _key_tiles(first_seen, last_seen, KEYS: tl.constexpr):
    """Return which keys the rows of a tile see together.

    Rows of two documents have no key in common; rows of one share those up to the first row's slot.

    Returns:
        begin, count: the first key, and the number of tiles from it on.
        full: the number of these tiles, the first ones, that all rows see in full.
    """
    begin, end = tl.min(first_seen, 0), tl.max(last_seen, 0) + 1
    count = tl.where(end > 0, tl.cdiv(end - begin, KEYS), 0)
    common = tl.where(tl.max(first_seen, 0) == begin, tl.min(last_seen, 0) + 1 - begin, 0)
    return begin, count, tl.maximum(common, 0) // KEYS


@triton.jit
def _step_pointers(tensors, step, offset, STEPS: tl.constexpr):
    """Return pointers [N], `offset` into the tensor of each step; Triton has no pointer arrays."""
    pointers = tensors[0] + offset
    for other in tl.static_range(1, STEPS):
        pointers = tl.where(step == other, tensors[other] + offset, pointers)
    return pointers


@triton.jit
def _step_key_tile(
    tile, packed_row, first, end, kv_head, batch, index, starts, step_keys, step_values, step_rows,
    num_steps, num_rows, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Load a tile of step keys: key n was computed by row `first + n % TOKENS` in a step.

    Returns:
        k, v: the keys and values.
        visible: which of them each `packed_row` sees.
        step, offset, exists: the step of each key (0: the unroll's first), its place in the tensor
            of that step, and whether there is such a key, all [KEYS].
    """
    number = tile * KEYS + tl.arange(0, KEYS)
    step, token = number // TOKENS, number % TOKENS
    row = first + token
    _, last_seen = _bounds(index, starts, row, end)
    exists = (step < num_steps) & (row < end) & (last_seen >= 0)
    line = step.to(tl.int64) * tl.num_programs(1) + batch  # of step_rows [steps · B, R]
    step_row = tl.load(step_rows + line * num_rows + row, exists, other=0)
    offset = (step_row * KV_HEADS + kv_head) * HEAD_DIM
    at_key = _step_pointers(step_keys, step, offset, STEPS)
    at_value = _step_pointers(step_values, step, offset, STEPS)
    k = _load_tile(at_key, exists, HEAD_DIM, HEAD_DIM_PADDED)
    v = _load_tile(at_value, exists, HEAD_DIM, HEAD_DIM_PADDED)
    visible = ((packed_row - first)[:, None] == token[None, :]) & exists[None, :]
    return k, v, visible, step, offset, exists


@triton.jit
def _accumulate(q, k, v, visible, top, total, acc, scale, PRECISION: tl.constexpr):
    """Add a tile of keys, of which `visible` [rows, keys] are visible (None: all), to the softmax.

    top: highest score; total: Σ 2^(score − top); acc: Σ 2^(score − top) · value.
    """
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if visible is not None:
        score = tl.where(visible, score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    # A row that has seen nothing yet: −inf − −inf would be NaN.
    base = new_top if visible is None else tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score * scale - base[:, None])
    rescale = tl.exp2(top - base)
    total = total * rescale + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
    return new_top, total, acc


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    query, key, value, step_keys, step_values, step_rows, index, starts, segments, output, lse,
    scale, num_rows, num_steps, num_segments,
    query_batch, query_row, query_head, key_batch, key_row, key_head,
    value_batch, value_row, value_head,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, STEPS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output, and log2 Σ 2^score of each row and head (+inf for padding).

    Grid [kv heads, B, tiles]. scale includes log2 e. step_keys, step_values: contiguous tensors
    [B · R_j, kv heads, head_dim].
    """
    TOKENS: tl.constexpr = ROWS // GROUP_PADDED
    # The last rows of a document see the most keys, so their programs start first.
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

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)
    for tile in range(tl.cdiv(steps * TOKENS, KEYS)):
        k, v, visible, _, _, _ = _step_key_tile(
            tile, row, first, end, kv_head, batch, index, starts, step_keys, step_values, step_rows,
            steps, num_rows, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, STEPS, TOKENS, KEYS,
        )  # fmt: skip
        top, total, acc = _accumulate(q, k, v, visible, top, total, acc, scale, PRECISION)

    key += batch * key_batch + kv_head * key_head
    value += batch * value_batch + kv_head * value_head
    for tile in range(full, count):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        read = j <= tl.max(last_seen, 0)
        k = _load_tile(key + j.to(tl.int64) * key_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, read, HEAD_DIM, HEAD_DIM_PADDED)
        visible = (first_seen[:, None] <= j[None, :]) & (j[None, :] <= last_seen[:, None])
        top, total, acc = _accumulate(q, k, v, visible, top, total, acc, scale, PRECISION)
    for tile in range(full):
        j = begin + tile * KEYS + tl.arange(0, KEYS)
        k = _load_tile(key + j.to(tl.int64) * key_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        v = _load_tile(value + j.to(tl.int64) * value_row, None, HEAD_DIM, HEAD_DIM_PADDED)
        top, total, acc = _accumulate(q, k, v, None, top, total, acc, scale, PRECISION)

    alive = total > 0
    total = tl.where(alive, total, 1.0)
    result = acc / total[:, None]
    at_row = (batch * num_rows + row) * (KV_HEADS * GROUP) + head
    _store_tile(output + at_row * HEAD_DIM, result, real, HEAD_DIM, HEAD_DIM_PADDED)
    # +inf for padding, so that 2^(score − lse) is 0 in the backward pass.
    tl.store(lse + at_row, tl.where(alive, top + tl.log2(total), float("inf")), real)


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
        k, v, visible, _, _, _ = _step_key_tile(
            tile, row, first, end, kv_head, batch, index, starts, step_keys, step_values, step_rows,
            steps, num_rows, KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, STEPS, TOKENS, KEYS,
        )  # fmt: skip
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
        k, v, visible, step, offset, exists = _step_key_tile(
            tile, row, first, num_rows, kv_head, batch, index, starts, step_keys, step_values,
            step_rows, num_steps, num_rows,
            KV_HEADS, HEAD_DIM, HEAD_DIM_PADDED, STEPS, TOKENS, KEYS,
        )  # fmt: skip
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
