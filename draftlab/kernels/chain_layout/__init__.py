"""Positions and cache slots of a chain drafter's passes, and the rows it goes on from.

`chain_layout` is computed once a step, before the first pass, so that a pass takes a slice. It lays
out the pairs just verified and, for each pass after them, one pair a row. `last_rows` picks a row's
last pair, or the columns from there on. On a GPU each is one kernel (`chain_layout/triton.py`).
Tests: tests/kernels/test_pass_layouts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.step_layout.types import ChainLayout


@triton_operator("chain_layout.triton")
def chain_layout(
    positions: Tensor, counts: Tensor, block_table: Tensor, block_size: int, num_later: int
) -> ChainLayout:
    """Return the layout of a chain: pass j > 0 feeds each row one pair, j positions further on.

    Args:
        positions: int64 [B, M] of the verified pairs, consecutive; −1 is padding, at the end.
        counts: int64 [B], real pairs of each row (1 for a row of padding alone).
        block_table: int32 [B, N].
        block_size: positions in a block.
        num_later: passes after the first.
    """
    last = positions.gather(1, counts[:, None] - 1)
    offset = torch.arange(1, num_later + 1, device=positions.device)
    later = (last + offset).where(last >= 0, -1)
    slots = slot_mapping(block_table, torch.cat([positions, later], 1), block_size)
    width = positions.shape[1]
    return ChainLayout(
        width,
        last[:, 0],
        torch.cat([positions.flatten(), later.T.flatten()]),
        torch.cat([slots[:, :width].flatten(), slots[:, width:].T.flatten()]),
    )


@triton_operator("chain_layout.triton")
def last_rows(x: Tensor, counts: Tensor, num_columns: int = 1) -> Tensor:
    """Return x[b, counts[b] − 1 + j] of x [B, M, …] for j < num_columns: [B, num_columns, …].

    All of these columns must lie in x. The result is contiguous, or x itself if M = num_columns.
    """
    if x.shape[1] == num_columns:
        return x
    columns = counts[:, None] - 1 + torch.arange(num_columns, device=x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], columns]
