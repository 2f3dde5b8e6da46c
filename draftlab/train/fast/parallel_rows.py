"""The rows of parallel drafting's fast pass, as its attention takes them (methods §4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from draftlab.kernels.parallel_attention import ParallelRows
from draftlab.kernels.ttt_attention import document_starts
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import row_starts, step_of_row, to_device


class PaddedRows:
    """The n rows that have queries, sorted by depth, and their padded layout [B, R].

    Args:
        layout: what attention takes.
        places: int64 [n], where each row lies in the layout, b · R + r.
    """

    def __init__(self, layout: ParallelRows, places: Tensor) -> None:
        self.layout, self._places, self._shape = layout, places, layout.index.shape
        # A single batch row has no padding, and its rows lie in the same order.
        self._is_padded = self._shape[0] > 1

    def pad(self, x: Tensor) -> Tensor:
        """Return x [n, …] as [B, R, …] with zeros in padding rows."""
        if self._is_padded:
            x = x.new_zeros(self._shape.numel(), *x.shape[1:]).index_copy(0, self._places, x)
        return x.unflatten(0, self._shape)

    def unpad(self, x: Tensor) -> Tensor:
        """Return the rows [n, …] of x [B, R, …], the inverse of `pad`."""
        x = x.flatten(0, 1)
        return x.index_select(0, self._places) if self._is_padded else x


def attention_rows(batch: Batch, steps: Sequence[StepRows]) -> tuple[PaddedRows, PaddedRows]:
    """Return the rows of all depths: with every position at depth 0, and with its loss rows alone.

    Args:
        steps: rows that carry loss at each depth; those of depth 1 and more are masked slots.
    """
    num_positions, device = batch.tokens.numel(), batch.tokens.device
    num_batch, width = batch.tokens.shape
    starts, masked = document_starts(batch.documents), steps[1:]
    depth = step_of_row([len(rows.valid_rows) for rows in steps], device)
    anchor = torch.cat([rows.teacher_index for rows in steps]) - 1 - depth
    depth, anchor = (x[len(steps[0].valid_rows) :] for x in (depth, anchor))
    number = torch.arange(len(depth), device=device)
    slots = number.new_full((len(masked) * num_positions,), -1)  # of each depth at each position
    slots = slots.index_copy(0, (depth - 1) * num_positions + anchor, number)
    slots = slots.view(len(masked), num_positions)
    # The slots that read a slot's key are those of its anchor, from its depth on.
    readers = slots.index_select(1, anchor)
    reads = (readers >= 0) & (torch.arange(1, len(steps), device=device)[:, None] >= depth)
    batch_start = torch.arange(num_batch, device=device)[:, None] * width

    def padded(first: Tensor, first_valid: Tensor) -> PaddedRows:
        """Return the rows of all depths; `StepRows.index` and `valid_rows` of depth 0 are given."""
        index = torch.cat([first, *(rows.index for rows in masked)], 1)
        sizes = first.shape[1], *(rows.index.shape[1] for rows in masked)
        if num_batch == 1:
            places = torch.arange(index.numel(), device=device)
        else:
            places = _places(sizes, [first_valid, *(rows.valid_rows for rows in masked)])
        layout = ParallelRows(
            sizes,
            index,
            row_starts(starts, replace(steps[0], index=index, valid_rows=places)),
            slots[:, batch_start + index],
            torch.where(reads, places[len(first_valid) :][readers], -1),
            to_device([0, *accumulate(sizes)], device),
        )
        return PaddedRows(layout, places)

    position = torch.arange(num_positions, device=device)
    everywhere = position[:width].expand(num_batch, width)
    return padded(everywhere, position), padded(steps[0].index, steps[0].valid_rows)


def _places(sizes: Sequence[int], valid_rows: Sequence[Tensor]) -> Tensor:
    """Return where the valid rows of each depth lie in [B, Σ sizes], flat."""
    places, before = [], 0
    for size, rows in zip(sizes, valid_rows, strict=True):
        places.append(rows // size * sum(sizes) + before + rows % size)
        before += size
    return torch.cat(places)
