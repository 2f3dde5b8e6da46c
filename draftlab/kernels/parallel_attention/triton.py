"""Triton kernel of the backward pass of `parallel_attention/`, for keys of masked slots."""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.ttt_attention.triton import UNSPECIALIZED, _load_tile, _store_tile


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
