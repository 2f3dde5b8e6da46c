"""Measure what steps of different shapes cost on the device, before an engine decodes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np
import torch

from draftlab.engine.input_batch import InputBatch
from draftlab.engine.step import StepShape

REPEATS, STEPS = 3, 4
"""Least timings of a shape, and steps of each, launched one behind the other."""
MOST_REPEATS, REPEATS_S = 20, 1.0
"""Most timings of a shape, and seconds after which there are no more of them than `REPEATS`."""


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
        return interpolate(self.measured[family], rows)


def interpolate(measured: Mapping[int, float], rows: float) -> float:
    """Return what was measured at some numbers of rows; beyond them, that of the nearest one."""
    if rows in measured:
        return measured[rows]
    sizes = sorted(measured)
    after = bisect_left(sizes, rows)
    if after in (0, len(sizes)):
        return measured[sizes[min(after, len(sizes) - 1)]]
    low, high = sizes[after - 1], sizes[after]
    weight = (rows - low) / (high - low)
    return (1 - weight) * measured[low] + weight * measured[high]


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
    shapes = [(family, rows) for family, each in sizes.items() for rows in each]
    times: dict[tuple[ShapeFamily, int], list[float]] = {shape: [] for shape in shapes}

    def timed(family: ShapeFamily, rows: int) -> float:
        slots, shape = tuple(range(rows)), family.shape(rows)
        batch.length[:rows], batch.stored[:rows] = length, shape.k

        def step() -> None:
            batch.newest[:-1], batch.drafts[:-1] = made_up[:, 0], made_up[:, 1:]
            run(slots, shape)

        return _elapsed(step, batch.device)

    for shape in shapes:
        timed(*shape)  # it compiles and captures
    # A disturbance of the machine, or a drift of its speed, meets all shapes alike.
    for _ in rounds():
        for shape in shapes:
            times[shape].append(timed(*shape))
    measured: dict[ShapeFamily, dict[int, float]] = {}
    for (family, rows), each in times.items():
        measured.setdefault(family, {})[rows] = float(np.median(each))
    for buffer in (batch.block_table, batch.length, batch.stored, batch.newest):
        buffer.zero_()
    return StepCosts(measured)


def rounds() -> Iterator[int]:
    """Yield the numbers of rounds of timings, until there are enough and a time is over."""
    started = time.perf_counter()
    for number in range(MOST_REPEATS):
        if number >= REPEATS and time.perf_counter() - started > REPEATS_S:
            return
        yield number


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
