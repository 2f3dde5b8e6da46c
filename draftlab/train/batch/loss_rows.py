"""Which predictions carry loss, and which rows each unrolled step runs (docs/methods.md §1, 2, 4).

`reach` is the number of steps that carry loss at a position: w_k(t) = 1 iff k < reach(t).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.kernels.noise import prompt_key
from draftlab.store.store import Record


def loss_reach(spans: Tensor) -> Tensor:
    """Return how many unrolled steps carry loss at each position.

    Step k at t predicts x_{t+2+k} having read x_{t+1+k}; a server can make that prediction iff
    x_{t+1} … x_{t+2+k} lie in one span. So reach(t) = max(0, e − t − 1), where e is the last
    position of the span that holds x_{t+1}. Spans and reach are int64 [T]; a span is 0 outside
    answers, else the answer's number.
    """
    ids = spans.numpy()
    positions = np.arange(len(ids))
    is_end = np.append(ids[1:] != ids[:-1], True)
    # The end of each position's span is the first end at or after the position.
    end = np.minimum.accumulate(np.where(is_end, positions, len(ids))[::-1])[::-1]
    reach = np.zeros_like(positions)
    reach[:-1] = np.where(ids[1:] > 0, end[1:] - positions[1:], 0)
    return torch.from_numpy(reach)


def joint_reach(of_records: Sequence[Tensor]) -> Tensor:
    """Return `loss_reach` of the spans [T] of each record, concatenated: int64 [Σ T]."""
    lengths = [*map(len, of_records)]
    spans = torch.cat([*of_records]).long()
    number = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    # Each record gets span numbers of its own, so that no span continues in the next record.
    reach = loss_reach(torch.where(spans > 0, spans + number * (spans.max() + 1), 0))
    reach[np.cumsum(lengths) - 1] = 0
    return reach


@dataclass(frozen=True)
class StepSampling:
    """A choice of the steps that each position of a record is trained with.

    Attributes:
        sample: (record, `TrainSettings`, seed, optimizer step) → most steps of each position, int64
            [T]. It is a function of a module, so that it can be pickled.
        shares: `TrainSettings` → the share of the positions that have each step.
    """

    sample: Callable[[Record, Any, int, int], Tensor]
    shares: Callable[[Any], list[float]]


def sample_depths(record: Record, settings: Any, seed: int, step: int) -> Tensor:
    """Sample how many depths each anchor of a record keeps (conditional drop): int64 [T].

    One random number decides all depths of an anchor, so that they are nested. It is a pure
    function of seed, optimizer step, record and position.
    """
    rising = _depth_probabilities(settings)[::-1]
    dropped = np.searchsorted(rising, _uniform(record, seed, step), side="right")
    return torch.from_numpy(len(rising) - dropped)


def _depth_probabilities(settings: Any) -> np.ndarray:
    """Return the probability that an anchor keeps each depth, falling from 1 at depth 0."""
    return np.maximum(settings.cod_ratio ** np.arange(settings.ttt_steps), settings.cod_min)


def sample_anchors(record: Record, settings: Any, seed: int, step: int) -> Tensor:
    """Sample the positions of a record at which a block starts: int64 [T], `ttt_steps` or 0.

    A position is chosen with probability `anchor_share`, as a pure function like `sample_depths`;
    of those that can carry loss, at least one is.
    """
    uniform = _uniform(record, seed, step)
    chosen = uniform < settings.anchor_share
    able = loss_reach(record.spans).numpy() > 0
    if able.any() and not chosen[able].any():
        chosen[np.where(able, uniform, 1.0).argmin()] = True
    return torch.from_numpy(np.where(chosen, settings.ttt_steps, 0))


def depth_shares(settings: Any) -> list[float]:
    """Return the share of the anchors that keep each depth under `sample_depths`."""
    return _depth_probabilities(settings).tolist()


def anchor_shares(settings: Any) -> list[float]:
    """Return the share of the positions that have each step under `sample_anchors`."""
    return [settings.anchor_share] * settings.ttt_steps


DEPTH_SAMPLING = StepSampling(sample_depths, depth_shares)
BLOCK_SAMPLING = StepSampling(sample_anchors, anchor_shares)


def _uniform(record: Record, seed: int, step: int) -> np.ndarray:
    """Return a random number of each position of a record in an optimizer step, float64 [T]."""
    key = prompt_key(record.id) % 2**64  # seeds of numpy's generator are unsigned
    return np.random.default_rng([seed, 2, step, key]).random(len(record.tokens))


@dataclass(frozen=True)
class StepRows:
    """The rows that step (or depth) k still runs (compaction), padded to the longest row.

    Attributes:
        select: int64 [B, R], the index of each row among the previous step's rows (step 0: among
            the positions).
        index: int64 [B, R], the position t of each row in its batch row.
        valid_rows: int64 [n], flat indices b·R + r of the rows that are not padding, ascending.
        teacher_index: int64 [n], flat indices b·S + t + 1 + k of their teachers p_{t+1+k}.
        origin: int64 [n], the index of each valid row among the previous step's valid rows
            (step 0: b·S + t).
    """

    select: Tensor
    index: Tensor
    valid_rows: Tensor
    teacher_index: Tensor
    origin: Tensor


def step_rows(reach: Tensor, num_steps: int) -> tuple[StepRows, ...]:
    """Return the rows of each step for reach [B, S]; steps without loss are empty."""
    depth = reach.numpy()
    num_rows, width = depth.shape
    row_start = np.arange(num_rows)[:, None] * width
    index, valid = np.broadcast_to(np.arange(width), depth.shape), np.ones(depth.shape, bool)
    steps: list[StepRows] = []
    for k in range(num_steps):
        has_loss = valid & (np.take_along_axis(depth, index, 1) > k)
        count = has_loss.sum(1).max(initial=0)
        select = np.argsort(~has_loss, axis=1, kind="stable")[:, :count].copy()
        index, valid = (np.take_along_axis(x, select, 1) for x in (index, has_loss))
        valid_rows = valid.ravel().nonzero()[0]
        # Rows without loss, which pad a step (`FixedSizes`), may read beyond the end: they wrap.
        teacher_index = (row_start + (index + 1 + k) % width).ravel()[valid_rows]
        origin = (row_start + index).ravel()[valid_rows]
        if steps:
            previous_width = steps[-1].index.shape[1]
            previous = np.arange(num_rows)[:, None] * previous_width + select
            origin = steps[-1].valid_rows.numpy().searchsorted(previous.ravel()[valid_rows])
        arrays = (select, index, valid_rows, teacher_index, origin)
        steps.append(StepRows(*map(torch.from_numpy, arrays)))
    return tuple(steps)


def split_anchors(reach: Tensor, num_steps: int, num_parts: int) -> list[Tensor]:
    """Split the anchors of reach [B, S] into parts; in each part, other anchors have reach 0.

    An anchor is a position with all its steps. The anchors of each row are split in order, into
    parts with about equally many predictions: parts then share few teachers.
    """
    work = reach.clamp(max=num_steps)
    before = work.cumsum(1) - work
    part = before * num_parts // work.sum(1, keepdim=True).clamp(min=1)
    return [torch.where(part == number, reach, 0) for number in range(num_parts)]
