"""In which order rows meet their teachers, and which rows are judged together (`distill.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Rows that are judged together, in the plan's order, and their teachers among its positions.

    The last teacher of a chunk may be the first one of the next.
    """

    rows: slice
    teachers: slice

    @property
    def num_rows(self) -> int:
        """At least one."""
        return self.rows.stop - self.rows.start

    @property
    def num_teachers(self) -> int:
        """At least one."""
        return self.teachers.stop - self.teachers.start


@dataclass(frozen=True)
class RowPlan:
    """R rows sorted by teacher; rows of one teacher stay in their order.

    Attributes:
        order: int64 [R], which row comes i-th.
        place: int64 [R], its teacher's index among `positions`.
        positions: int64 [J], where the teachers are, ascending, without repetition.
        host: `place` on the CPU.
    """

    order: Tensor
    place: Tensor
    positions: Tensor
    host: Tensor

    def to(self, device: torch.device | str) -> RowPlan:
        """The plan on another device; `host` stays."""
        moved = (t.to(device, non_blocking=True) for t in (self.order, self.place, self.positions))
        return RowPlan(*moved, self.host)

    def chunks(self, height: int) -> list[Chunk]:
        """Cuts the rows into chunks of about equal size.

        Args:
            height: rows and teachers that a chunk may have together; 2 if less.
        """
        num_rows = len(self.host)
        if num_rows == 0:
            return []
        # Rows [i, j) and their teachers are key[j − 1] − key[i] + 2.
        key = self.host + torch.arange(num_rows)
        # Each chunk but the last covers height − 1 of key or more: as few chunks as possible, and
        # then as low ones as possible, so that none is much smaller than the others.
        span = int(key[-1]) + 1
        number = -(-span // (max(height, 2) - 1))
        height = -(-span // number) + 1
        found, start = [], 0
        while start < num_rows:
            stop = int(torch.searchsorted(key, key[start] + height - 2, right=True))
            first, last = int(self.host[start]), int(self.host[stop - 1])
            found.append(Chunk(slice(start, stop), slice(first, last + 1)))
            start = stop
        return found


def plan_rows(row: Tensor) -> RowPlan:
    """Plans rows by the position of each one's teacher, int64 [R], in any order.

    Best made of a CPU tensor where batches are prepared, and moved with them: of a GPU's, the host
    waits for it.
    """
    positions, place = row.unique(return_inverse=True)
    order = place.argsort(stable=True)
    place = place[order]
    return RowPlan(order, place, positions, place.cpu())
