"""Which predictions carry loss, and which rows each step of an unroll runs (methods §1, §2, §4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftlab.kernels.noise import prompt_key
from draftlab.store.store import Record


def loss_reach(spans: Tensor) -> Tensor:
    """How many steps of an unroll at each position carry loss: w_k(t) = 1 iff k < reach(t).

    Step k at t predicts x_{t+2+k} having read x_{t+1+k}; a server can make that prediction iff
    x_{t+1} … x_{t+2+k} lie in one span. So reach(t) = max(0, e − t − 1), e being the last position
    of the span that holds x_{t+1}.

    Args:
        spans: int64 [T], 0 outside answers, else the answer's number.

    Returns:
        int64 [T].
    """
    ids = spans.numpy()
    at = np.arange(len(ids))
    is_end = np.append(ids[1:] != ids[:-1], True)
    # The end of each position's span: the first end at or after it.
    end = np.minimum.accumulate(np.where(is_end, at, len(ids))[::-1])[::-1]
    reach = np.zeros_like(at)
    reach[:-1] = np.where(ids[1:] > 0, end[1:] - at[1:], 0)
    return torch.from_numpy(reach)


def joint_reach(records: Sequence[Record]) -> Tensor:
    """`loss_reach` of each of the records, one behind the other: int64 [Σ T]."""
    sizes = [len(record.spans) for record in records]
    spans = torch.cat([record.spans for record in records]).long()
    number = torch.from_numpy(np.repeat(np.arange(len(records)), sizes))
    # No span goes on in the next record, whose first token nobody predicts.
    reach = loss_reach(torch.where(spans > 0, spans + number * (spans.max() + 1), 0))
    reach[np.cumsum(sizes) - 1] = 0
    return reach


def depths_kept(
    record: Record, num_depths: int, *, ratio: float, least: float, seed: int, step: int
) -> Tensor:
    """Conditional drop: how many depths each anchor of a record keeps, int64 [T].

    Depth d is kept with probability max(ratio^d, least) (depth 0 always), all depths of an anchor
    by one number, so that they are nested. That number is a function of seed, optimizer step,
    record and position alone.
    """
    key = prompt_key(record.id) % 2**64  # a generator's seeds have no sign
    drawn = np.random.default_rng([seed, 2, step, key]).random(len(record.tokens))
    chance = np.maximum(ratio ** np.arange(num_depths), least)  # falls with the depth
    return torch.from_numpy(num_depths - np.searchsorted(chance[::-1], drawn, side="right"))


@dataclass(frozen=True)
class StepRows:
    """The rows that step k of an unroll still runs (compaction), padded to the longest row.

    Depth d of parallel drafting is step d here: it has the same predictions and teachers.

    Attributes:
        select: int64 [B, R], which of the previous step's rows they are (step 0: which positions).
        index: int64 [B, R], their position t in the batch row.
        loss: int64 [n], flat indices b·R + r of the real ones, in order.
        teacher: int64 [n], flat indices b·S + t + 1 + k of their teachers p_{t+1+k}.
        origin: int64 [n], which of the previous step's real ones they are (step 0: b·S + t).
    """

    select: Tensor
    index: Tensor
    loss: Tensor
    teacher: Tensor
    origin: Tensor


def step_rows(reach: Tensor, num_steps: int) -> tuple[StepRows, ...]:
    """Rows of each step for reach [B, S]; steps that nothing reaches are empty."""
    depth = reach.numpy()
    num_rows, width = depth.shape
    first = np.arange(num_rows)[:, None] * width
    index, alive = np.broadcast_to(np.arange(width), depth.shape), np.ones(depth.shape, bool)
    steps: list[StepRows] = []
    for k in range(num_steps):
        wanted = alive & (np.take_along_axis(depth, index, 1) > k)
        count = wanted.sum(1).max(initial=0)
        select = np.argsort(~wanted, axis=1, kind="stable")[:, :count].copy()
        index, alive = (np.take_along_axis(x, select, 1) for x in (index, wanted))
        loss = alive.ravel().nonzero()[0]
        teacher = (first + index + 1 + k).ravel()[loss]
        origin = teacher - 1
        if steps:
            earlier = steps[-1].index.shape[1]
            picked = np.arange(num_rows)[:, None] * earlier + select
            origin = steps[-1].loss.numpy().searchsorted(picked.ravel()[loss])
        made = (select, index, loss, teacher, origin)
        steps.append(StepRows(*map(torch.from_numpy, made)))
    return tuple(steps)


def deal(reach: Tensor, num_steps: int, passes: int) -> list[Tensor]:
    """Cuts the anchors of reach [B, S] into `passes` parts; in each, the others' reach is 0.

    An anchor is a position with its steps. Each row's anchors are cut in order, so that a part sees
    few teachers of another's, into parts of about as many predictions.
    """
    work = reach.clamp(max=num_steps)
    before = work.cumsum(1) - work
    part = before * passes // work.sum(1, keepdim=True).clamp(min=1)
    return [torch.where(part == number, reach, 0) for number in range(passes)]
