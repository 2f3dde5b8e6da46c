"""Attention of parallel drafting in training, all depths in one call (docs/methods.md §4).

A row of depth d attends to the depth-0 keys of its document up to its anchor's position, and to the
keys of its anchor's masked slots of depths 1..d, its own among them. In contrast to training-time
test (`ttt_attention/`), rows share these keys: all rows of an anchor from depth j on read the key
of its depth j.

The forward pass and the gradients of queries and depth-0 keys use the kernels of
`ttt_attention/`, which take the rows of each depth as a segment. Tests:
tests/kernels/test_training_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.ttt_attention import attend_eagerly, check_inputs


@dataclass(frozen=True)
class ParallelRows:
    """R query rows of each of B batch rows, sorted by depth, and the M masked slots they see.

    Attributes:
        sizes: number of rows of each depth 0..D, Σ = R.
        index: int64 [B, R], the position of each row's anchor in its batch row.
        starts: int64 [B, R], where the anchor's document begins; beyond `index` for padding rows.
        slots: int64 [D, B, R]; slots[j − 1] is the masked slot of depth j of each row's anchor, or
            −1. It counts for rows of depth j or more that are not padding.
        readers: int64 [D, M]; readers[d − 1] is the row of depth d that attends to each masked
            slot: flat, b · R + r, or −1 for none.
        segments: int64 [D + 2], the first row of each depth, and R.
    """

    sizes: tuple[int, ...]
    index: Tensor
    starts: Tensor
    slots: Tensor
    readers: Tensor
    segments: Tensor


@triton_operator("ttt_attention.launch")
def parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slot_key: Tensor,
    slot_value: Tensor,
    rows: ParallelRows,
) -> Tensor:
    """Return the attention of rows of all depths to depth-0 keys and to keys of masked slots.

    Padding rows see nothing, yield zeros and have no gradient. On a GPU this is fast if the rows of
    each depth are sorted by position.

    Args:
        query: [B, R, heads, head_dim], rotated. Query head h reads kv head h // (heads / kv heads).
        key, value: of depth 0, [B, S, kv heads, head_dim], in the query's dtype.
        slot_key, slot_value: of the masked slots, [M, kv heads, head_dim].
        rows: what each row sees.

    Returns:
        [B, R, heads, head_dim], scaled by head_dim^−½, softmax in float32.

    Raises:
        ValueError: if the heads are no multiple of the kv heads, or dtypes differ.
    """
    check_inputs(query, key, value, slot_key, slot_value)
    # Slots of rows of depth 1 and more; padding rows may have none.
    slots = rows.slots[:, :, rows.sizes[0] :].permute(1, 2, 0).clamp(min=0)
    own_key, own_value = (
        x.index_select(0, slots.flatten()).unflatten(0, slots.shape) for x in (slot_key, slot_value)
    )
    inputs = [x.split(rows.sizes, 1) for x in (query, rows.index, rows.starts)]
    own = zip(*(x.split(rows.sizes[1:], 1) for x in (own_key, own_value)), strict=True)
    attended = []
    for depth, (queries, index, starts) in enumerate(zip(*inputs, strict=True)):
        keys = tuple(x[:, :, :depth] for x in next(own)) if depth else None
        attended.append(attend_eagerly(queries, key, value, index, starts, keys))
    return torch.cat(attended, 1)
