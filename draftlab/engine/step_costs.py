"""Measure what steps of different shapes cost on the device, before an engine decodes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch

from draftlab.engine.input_batch import InputBatch
from draftlab.engine.step import StepShape

REPEATS, STEPS = 4, 4
"""Timings of a shape, and steps of each, launched one behind the other."""


@dataclass(frozen=True)
class ShapeFamily:
    """Steps of one K that verify a share of the drafts of a batch, whatever its size.

    Attributes:
        k: see `StepShape`.
        share: share of the batch's rows · k drafts that is verified; 1: all.
        confidence: whether steps that verify all drafts state their confidence, too.
    """

    k: int
    share: float = 1.0
    confidence: bool = False

    @property
    def states_confidence(self) -> bool:
        """Return whether the steps state the confidence of their drafts."""
        return self.confidence or self.share < 1

    def shape(self, rows: int) -> StepShape:
        """Return the shape for a batch."""
        budget = None if self.share == 1 else int(self.share * rows * self.k)
        return StepShape(self.k, budget, self.states_confidence)


@dataclass(frozen=True)
class StepCosts:
    """Milliseconds of a step, by family and number of rows.

    Attributes:
        measured: for each family, milliseconds by rows.
    """

    measured: Mapping[ShapeFamily, Mapping[int, float]]

    def ms(self, family: ShapeFamily, rows: int) -> float:
        """Return the milliseconds of a step, interpolated between measured numbers of rows."""
        by_rows = self.measured[family]
        if rows in by_rows:
            return by_rows[rows]
        sizes = sorted(by_rows)
        after = bisect_left(sizes, rows)
        if after in (0, len(sizes)):
            return by_rows[sizes[min(after, len(sizes) - 1)]]
        low, high = sizes[after - 1], sizes[after]
        weight = (rows - low) / (high - low)
        return (1 - weight) * by_rows[low] + weight * by_rows[high]


def measure_step_costs(
    run: Callable[[tuple[int, ...], StepShape], object],
    batch: InputBatch,
    sizes: Mapping[ShapeFamily, Sequence[int]],
    *,
    tokens: Sequence[int],
    length: int,
    num_blocks: int,
) -> StepCosts:
    """Return the median time of steps on made-up requests of `length` tokens.

    It writes to the KV cache and to the input batch, which is empty again afterwards, so no request
    may be running.

    Args:
        run: launches a step of slots, and all that the engine launches with it.
        sizes: the numbers of rows to measure each family at; families without any are left out.
        tokens: what the rows are made up of, over and over. Different ones visit the experts of a
            mixture as real requests do.
        num_blocks: blocks of the pool beside block 0.
    """
    width = batch.block_table.shape[1]
    blocks = torch.arange(batch.num_slots * width, device=batch.device) % num_blocks + 1
    batch.block_table[:-1] = blocks.view(-1, width).int()
    count = batch.num_slots * (1 + batch.drafts.shape[1])
    made_up = batch.to_device([*islice(cycle(tokens), count)], torch.int64)
    made_up = made_up.view(batch.num_slots, -1)
    measured: dict[ShapeFamily, dict[int, float]] = {}
    for family, rows in ((family, rows) for family, each in sizes.items() for rows in each):
        slots, shape, times = tuple(range(rows)), family.shape(rows), []

        def step(slots: tuple[int, ...] = slots, shape: StepShape = shape) -> None:
            batch.newest[:-1], batch.drafts[:-1] = made_up[:, 0], made_up[:, 1:]
            run(slots, shape)

        for repeat in range(REPEATS + 1):  # the first one compiles and captures
            batch.length[:rows], batch.stored[:rows] = length, shape.k
            elapsed = _elapsed(step, batch.device)
            if repeat:
                times.append(elapsed)
        measured.setdefault(family, {})[rows] = float(np.median(times))
    for buffer in (batch.block_table, batch.length, batch.stored, batch.newest):
        buffer.zero_()
    return StepCosts(measured)


def _elapsed(step: Callable[[], None], device: torch.device) -> float:
    """Return the milliseconds that a step takes on the device behind another one."""
    if device.type != "cuda":
        started = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    step()  # the host launches the others while it runs
    start.record()
    for _ in range(STEPS):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / STEPS
