"""The order of rows by teacher, and their division into chunks (`distill/linear.py`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.kernels.compile_ahead import real_tensors
from draftlab.kernels.devices import copy_to_device


@dataclass(frozen=True)
class Chunk:
    """Rows that are processed together, in the plan's order, and their teachers' positions.

    The last teacher of a chunk may be the first one of the next. `teachers` is int64 [c] in a plan
    with fixed chunks, and the last ones may be those of no row.
    """

    rows: slice
    teachers: slice | Tensor

    @property
    def num_rows(self) -> int:
        """Return the number of rows, at least one."""
        return self.rows.stop - self.rows.start

    @property
    def num_teachers(self) -> int:
        """Return the number of teachers, at least one."""
        if isinstance(self.teachers, Tensor):
            return len(self.teachers)
        return self.teachers.stop - self.teachers.start


@dataclass(frozen=True)
class RowPlan:
    """The order of R rows sorted by teacher; rows of one teacher stay in their order.

    Attributes:
        order: int64 [R], the i-th row.
        teacher_index: int64 [R], the index of its teacher in `positions`.
        positions: int64 [J], the teachers' positions, ascending, without repetition.
        host: `teacher_index` on the CPU.
        fixed: rows and teachers of each chunk, whatever the batch is; positions may then repeat at
            the end. None: `chunks` chooses them.
    """

    order: Tensor
    teacher_index: Tensor
    positions: Tensor
    host: Tensor
    fixed: tuple[int, int] | None = None

    def most_teachers(self, rows: int) -> int:
        """Return the most teachers of a chunk if chunks have so many rows each."""
        host = self.host.numpy()
        last = np.append(host[rows - 1 :: rows], host[-1:])
        return int((last[: len(host[::rows])] - host[::rows]).max(initial=-1)) + 1

    def chunks(self, height: int) -> list[Chunk]:
        """Return chunks of rows, of about equal size.

        Args:
            height: the most rows and teachers of a chunk together; at least 2. Fixed chunks have
                sizes of their own.
        """
        num_rows = len(self.host)
        if num_rows == 0:
            return []
        if self.fixed is not None:
            rows, last = self.fixed[0], len(self.positions) - 1
            following = torch.arange(self.fixed[1], device=self.order.device)
            return [
                Chunk(
                    slice(at, min(at + rows, num_rows)),
                    (self.teacher_index[at] + following).clamp(max=last),
                )
                for at in range(0, num_rows, rows)
            ]
        # Rows [i, j) and their teachers are key[j − 1] − key[i] + 2.
        with real_tensors():  # shapes depend on these values
            host = self.host.numpy()
        key = host + np.arange(num_rows)
        # Each chunk but the last covers at least height − 1 of key. Use as few chunks as possible,
        # then the smallest height for that number, so that no chunk is much smaller than others.
        span = int(key[-1]) + 1
        number = -(-span // (max(height, 2) - 1))
        height = -(-span // number) + 1
        chunks, start = [], 0
        while start < num_rows:
            stop = int(key.searchsorted(key[start] + height - 2, side="right"))
            first, last = int(host[start]), int(host[stop - 1])
            chunks.append(Chunk(slice(start, stop), slice(first, last + 1)))
            start = stop
        return chunks

    def thinned(self, teachers: int) -> tuple[Tensor | slice, RowPlan]:
        """Return the rows of every nth teacher, int64 [R'], and their plan; the host does not wait.

        Args:
            teachers: how many to keep at least; n is the largest number that does, or 1.
        """
        every = len(self.positions) // max(1, teachers)
        if every < 2:
            return slice(None), self
        with real_tensors():  # as in `chunks`
            kept = (self.host % every == 0).nonzero()[:, 0]
            host = self.host[kept] // every
        index = copy_to_device(kept, self.order.device)
        plan = RowPlan(
            torch.arange(len(kept), device=self.order.device),
            self.teacher_index[index] // every,
            self.positions[::every],
            host,
        )
        return self.order[index], plan

    def thinned_to_fixed(self, teachers: int, most_rows: int) -> tuple[Tensor, RowPlan, Tensor]:
        """Return `thinned` with a number of rows that depends on that of teachers alone.

        Args:
            most_rows: of a teacher that is kept; further rows are left out.

        Returns:
            The rows, int64 [R'], their plan, and which of them count, bool [R']: others stand in
            the places of a teacher that has fewer rows.
        """
        every, device = max(1, len(self.positions) // max(1, teachers)), self.order.device
        kept = torch.arange(0, len(self.positions), every, device=device)
        begins = torch.searchsorted(self.teacher_index, kept)
        wanted = begins[:, None] + torch.arange(most_rows, device=device)
        places = wanted.clamp(max=len(self.order) - 1)  # twice the last row, which counts once
        counts = (places == wanted) & (self.teacher_index[places] == kept[:, None])
        number = torch.arange(wanted.numel(), device=device)
        with real_tensors():
            host = torch.arange(wanted.numel()) // most_rows
        plan = RowPlan(number, number // most_rows, self.positions[::every], host)
        return self.order[places.flatten()], plan, counts.flatten()


def plan_rows(row: Tensor) -> RowPlan:
    """Return a plan of rows by their teachers' positions, int64 [R], in any order.

    Plan on the CPU, where batches are prepared, and move the plan with them: for a GPU tensor the
    host waits.
    """
    teachers = row.cpu().numpy()
    # A stable sort merges the ascending runs that a batch's steps are.
    order = teachers.argsort(kind="stable")
    teachers = teachers[order]
    is_new = np.append(True, teachers[1:] != teachers[:-1])[: len(teachers)]
    index = torch.from_numpy(is_new.cumsum() - 1)
    order, positions = (torch.from_numpy(a).to(row.device) for a in (order, teachers[is_new]))
    return RowPlan(order, index.to(row.device), positions, index)
