"""Where a chain's pairs go: those just observed, and one a row for every pass after them.

Computed once a step, before the first pass, so a pass takes a slice and no operation of its own.
`last_rows` picks what a row goes on from: its last pair, or the columns from there on. The eager
references run on a CPU; on a GPU each is one kernel (`chain_layout_triton.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.paged_attention import slot_mapping


@dataclass(frozen=True)
class ChainLayout:
    """Pairs of B rows, flat: B · M observed ones row by row, then B of each later pass.

    Attributes:
        width: M.
        last: int64 [B], position of each row's last observed pair; −1 for a row of padding.
        positions: int64 [B · (M + later passes)]; −1 is padding.
        slots: the same shape, where their keys go; −1 nowhere.
    """

    width: int
    last: Tensor
    positions: Tensor
    slots: Tensor

    def of_pass(self, flat: Tensor, number: int) -> Tensor:
        """The part [B, M, …] (pass 0) or [B, 1, …] of something flat, [B · (M + later), …]."""
        rows = len(self.last)
        if number == 0:
            return flat[: rows * self.width].view(rows, self.width, *flat.shape[1:])
        start = rows * (self.width + number - 1)
        return flat[start : start + rows].unsqueeze(1)


def chain_layout(
    positions: Tensor, counts: Tensor, block_table: Tensor, block_size: int, later: int
) -> ChainLayout:
    """Lays a chain out: pass j > 0 feeds each row one pair, j positions behind its last one.

    Args:
        positions: int64 [B, M] of the observed pairs, consecutive; −1 is padding, at the end.
        counts: int64 [B], real pairs of each row (1 for a row of padding alone).
        block_table: int32 [B, N].
        block_size: positions in a block.
        later: passes after the first.
    """
    if positions.is_cuda:
        from draftlab.kernels.chain_layout_triton import chain_layout_triton as operation
    else:
        operation = chain_layout_reference
    return operation(positions, counts, block_table, block_size, later)


def last_rows(x: Tensor, counts: Tensor, ahead: int = 1) -> Tensor:
    """x[b, counts[b] − 1 + j] of x [B, M, …] for j < `ahead`: [B, ahead, …], contiguous.

    All of them must lie in x.
    """
    if x.shape[1] == ahead:
        return x
    if x.is_cuda:
        from draftlab.kernels.chain_layout_triton import last_rows_triton as operation
    else:
        operation = last_rows_reference
    return operation(x, counts, ahead)


def chain_layout_reference(
    positions: Tensor, counts: Tensor, block_table: Tensor, block_size: int, later: int
) -> ChainLayout:
    """`chain_layout`, eager."""
    last = positions.gather(1, counts[:, None] - 1)
    ahead = torch.arange(1, later + 1, device=positions.device)
    behind = (last + ahead).where(last >= 0, -1)
    slots = slot_mapping(block_table, torch.cat([positions, behind], 1), block_size)
    width = positions.shape[1]
    return ChainLayout(
        width,
        last[:, 0],
        torch.cat([positions.flatten(), behind.T.flatten()]),
        torch.cat([slots[:, :width].flatten(), slots[:, width:].T.flatten()]),
    )


def last_rows_reference(x: Tensor, counts: Tensor, ahead: int = 1) -> Tensor:
    """`last_rows`, eager."""
    columns = counts[:, None] - 1 + torch.arange(ahead, device=x.device)
    return x[torch.arange(len(x), device=x.device)[:, None], columns]
