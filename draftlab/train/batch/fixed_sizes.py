"""Batches of one shape, so that a CUDA graph of one batch's step runs others (`step_graph.py`).

Positions are padded at the end, and each step's rows by rows that carry no loss: positions in front
of answers and rows that ended in earlier steps. No row stands for two, so that nothing else
changes: such rows have a weight of 0, hence gradients of 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftlab.kernels.distill.plan import RowPlan, plan_rows
from draftlab.train.batch.loss_rows import StepRows, step_rows

MARGIN = 2.0
"""Standard deviations between the mean number of rows and the fixed one: of batches with 25,000
rows a step 95 % fit, with 5 % more rows. A larger margin costs all more than it saves others."""
_MULTIPLE = 64
"""Sizes are multiples of this, which suits the tiles of products."""


@dataclass(frozen=True)
class Padding:
    """The rows of a batch of fixed sizes that carry loss: bool [R] of all steps, the numbers N_k of
    each, and that of the positions that they learn from.
    """

    valid: Tensor
    counts: tuple[int, ...]
    num_teachers: int


@dataclass(frozen=True)
class FixedSizes:
    """The sizes of a batch of one row.

    Attributes:
        positions: S. rows: of each step, not rising.
        teachers: of all rows. chunk: rows and teachers of the loss's chunks (`RowPlan.fixed`).
    """

    positions: int
    rows: tuple[int, ...]
    teachers: int
    chunk: tuple[int, int]

    @classmethod
    def choose(
        cls, reaches: Iterable[Tensor], most_positions: int, num_steps: int, height: int
    ) -> FixedSizes:
        """Return sizes that nearly all batches fit.

        Args:
            reaches: of some batches, int64 [Σ T] (`joint_reach`). most_positions: of any batch.
            height: about the most rows and teachers of a chunk together.
        """
        sizes, plans = [], []
        for reach in reaches:
            steps = step_rows(reach[None], num_steps)
            plans.append(plan_rows(torch.cat([rows.teacher_index for rows in steps])))
            counts = (len(rows.index[0]) for rows in steps)
            sizes.append([len(reach), len(plans[-1].positions) + 1, *counts])
        positions, teachers, *rows = _bounds(np.array(sizes))
        positions = min(positions, most_positions)
        rows = np.maximum.accumulate(rows[::-1])[::-1].clip(max=positions).tolist()
        chunks = -(-(sum(rows) + teachers) // max(1, height))
        of_chunk = max(1, -(-sum(rows) // chunks))
        most = _bounds(np.array([[plan.most_teachers(of_chunk) + 1] for plan in plans]))
        return cls(positions, tuple(rows), teachers, (of_chunk, min(teachers, *most)))

    def pad(self, reach: Tensor) -> tuple[tuple[StepRows, ...], RowPlan, Padding] | None:
        """Return the rows of each step, and their plan, of a batch with int64 [Σ T] reach, in place
        of `step_rows` and `plan_rows`; None: the batch does not fit, or has no loss.

        The rows without loss learn from a teacher of their own, the plan's last with rows, and read
        a token that no other row of their step reads.
        """
        if len(reach) > self.positions:
            return None
        real = np.zeros(self.positions, np.int64)
        real[: len(reach)] = reach.clamp(max=len(self.rows)).numpy()
        counts = tuple(int((real > k).sum()) for k in range(len(self.rows)))
        if counts[0] == 0 or any(n > most for n, most in zip(counts, self.rows, strict=True)):
            return None
        order = (-real).argsort(kind="stable")
        padded = np.zeros_like(real)
        for number in self.rows:
            padded[order[:number]] += 1
        steps = step_rows(torch.from_numpy(padded)[None], len(self.rows))
        depths = torch.from_numpy(real)
        valid = torch.cat([depths[rows.index[0]] > k for k, rows in enumerate(steps)])
        teachers = torch.cat([rows.teacher_index for rows in steps])
        plan = plan_rows(teachers.where(valid, self.positions))
        missing = self.teachers - len(plan.positions)
        if missing < 0 or plan.most_teachers(self.chunk[0]) > self.chunk[1]:
            return None
        num_teachers = int((plan.positions < self.positions).sum())
        last = torch.full((missing,), self.positions)
        positions = torch.cat([plan.positions, last]).clamp(max=self.positions - 1)
        plan = replace(plan, positions=positions, fixed=self.chunk)
        return steps, plan, Padding(valid, counts, num_teachers)


def _bounds(numbers: np.ndarray) -> list[int]:
    """Return a bound of each column of numbers of batches [n, m], on the safe side by `MARGIN`."""
    bounds = numbers.mean(0) + MARGIN * numbers.std(0)
    return (np.ceil(bounds / _MULTIPLE).astype(np.int64) * _MULTIPLE).tolist()
