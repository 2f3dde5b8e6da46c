"""Which predictions carry loss, and how conversations share rows of a batch (METHODS §1, §2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from draftlab.base import UserError
from draftlab.data.store import Record


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
    length = len(spans)
    at = torch.arange(length)
    is_end = torch.ones(length, dtype=torch.bool)
    is_end[:-1] = spans[1:] != spans[:-1]
    # The end of each position's span: the first end at or after it.
    end = torch.where(is_end, at, length).flip(0).cummin(0).values.flip(0)
    reach = torch.zeros(length, dtype=torch.int64)
    reach[:-1] = torch.where(spans[1:] > 0, end[1:] - at[1:], 0)
    return reach


@dataclass(frozen=True)
class StepRows:
    """The rows that step k of an unroll still runs (compaction), padded to the longest row.

    Depth d of parallel drafting is step d here: it has the same predictions and teachers.

    Attributes:
        select: int64 [B, R], which of the previous step's rows they are (step 0: which positions).
        index: int64 [B, R], their position t in the batch row.
        loss: int64 [n], flat indices b·R + r of the real ones, in order.
        teacher: int64 [n], flat indices b·S + t + 1 + k of their teachers p_{t+1+k}.
    """

    select: Tensor
    index: Tensor
    loss: Tensor
    teacher: Tensor


@dataclass(frozen=True)
class Batch:
    """Conversations packed into B rows of S positions; `documents` keeps them apart.

    Attributes:
        tokens, documents, positions: int64 [B, S]; document −1 is padding; positions restart with
            each conversation.
        features: [B, S, F]. last: [B, S, Ht]. logsumexp: float32 [B, S]. argmax: int64 [B, S].
        passes: the rows of each step, for each pass over the batch (see `pack`).
        records: how many conversations. num_tokens: how many real positions.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    features: Tensor
    last: Tensor
    logsumexp: Tensor
    argmax: Tensor
    passes: tuple[tuple[StepRows, ...], ...]
    records: int
    num_tokens: int

    @property
    def steps(self) -> tuple[StepRows, ...]:
        """The rows of each step, of a batch of one pass."""
        (steps,) = self.passes
        return steps

    @property
    def counts(self) -> list[int]:
        """N_k: how many positions carry loss at each step, over all passes."""
        return [sum(len(rows.loss) for rows in step) for step in zip(*self.passes, strict=True)]

    @property
    def num_anchors(self) -> int:
        """Number of w_0 positions, N_0."""
        return self.counts[0]

    def split(self) -> Iterator[Batch]:
        """A batch for each pass; they share all but their rows."""
        return (replace(self, passes=(steps,)) for steps in self.passes)

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        move = lambda t: t.to(device, non_blocking=True)  # noqa: E731
        passes = tuple(
            tuple(
                StepRows(move(s.select), move(s.index), move(s.loss), move(s.teacher))
                for s in steps
            )
            for steps in self.passes
        )
        return Batch(
            move(self.tokens),
            move(self.documents),
            move(self.positions),
            move(self.features),
            move(self.last),
            move(self.logsumexp),
            move(self.argmax),
            passes,
            self.records,
            self.num_tokens,
        )


def step_rows(reach: Tensor, num_steps: int) -> tuple[StepRows, ...]:
    """Rows of each step for reach [B, S]; steps that nothing reaches are empty."""
    num_rows, width = reach.shape
    index = torch.arange(width).expand(num_rows, width)
    alive = torch.ones_like(index, dtype=torch.bool)
    steps = []
    for k in range(num_steps):
        wanted = alive & (reach.gather(1, index) > k)
        count = int(wanted.sum(1).max()) if wanted.numel() else 0
        select = wanted.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :count]
        index, alive = index.gather(1, select), wanted.gather(1, select)
        flat = alive.flatten().nonzero()[:, 0]
        row = torch.arange(num_rows)[:, None] * width
        steps.append(StepRows(select, index, flat, (row + index + 1 + k).flatten()[flat]))
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


def pack(
    records: Sequence[Sequence[Record]],
    row_tokens: int,
    num_steps: int,
    *,
    keep: Callable[[Record], Tensor] | None = None,
    passes: int = 1,
) -> Batch:
    """Builds a batch from the records of each row; rows are trimmed to the longest one.

    Args:
        keep: how many steps each position of a record may have at most, int64 [T]; None: all.
        passes: parts that the anchors are dealt to, to be run one after the other: less memory, the
            same sum of losses.
    """
    num_rows = len(records)
    width = max(sum(len(r.tokens) for r in row) for row in records)
    sample = records[0][0]
    tokens = torch.zeros(num_rows, width, dtype=torch.int64)
    documents = torch.full_like(tokens, -1)
    positions, reach, argmax = (torch.zeros_like(tokens) for _ in range(3))
    features = sample.features.new_zeros(num_rows, width, sample.features.shape[-1])
    last = sample.last.new_zeros(num_rows, width, sample.last.shape[-1])
    logsumexp = torch.zeros(num_rows, width)
    if width > row_tokens:
        raise ValueError(f"a row of {width} tokens exceeds row_tokens {row_tokens}")
    for b, row in enumerate(records):
        start = 0
        for number, record in enumerate(row):
            at = slice(start, start + len(record.tokens))
            tokens[b, at], documents[b, at] = record.tokens, number
            positions[b, at] = torch.arange(len(record.tokens))
            reach[b, at], argmax[b, at] = loss_reach(record.spans), record.argmax
            if keep is not None:
                reach[b, at] = reach[b, at].minimum(keep(record))
            features[b, at], last[b, at] = record.features, record.last
            logsumexp[b, at] = record.logsumexp
            start = at.stop
    return Batch(
        tokens,
        documents,
        positions,
        features,
        last,
        logsumexp,
        argmax,
        tuple(step_rows(part, num_steps) for part in deal(reach, num_steps, passes)),
        sum(len(row) for row in records),
        int((documents >= 0).sum()),
    )


def plan_rows(
    lengths: Sequence[int], row_tokens: int, *, seed: int, epoch: int, open_rows: int = 64
) -> list[list[int]]:
    """Assigns every record to a row of at most `row_tokens`, in an order fixed by seed and epoch.

    Records come in random order and go into the fullest of the last `open_rows` rows that has room;
    the rows are then shuffled, so that late, emptier rows do not end up together.
    """
    longest = max(lengths)
    if longest > row_tokens:
        raise UserError(
            f"expected records of at most train.row_tokens = {row_tokens} tokens, found one of "
            f"{longest}",
            do="raise train.row_tokens or lower record.max_length",
        )
    generator = np.random.default_rng([seed, epoch])
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for record in generator.permutation(len(lengths)).tolist():
        fitting = [r for r, left in room.items() if left >= lengths[record]]
        if fitting:
            row = min(fitting, key=lambda r: (room[r], r))
        else:
            row = len(rows)
            rows.append([])
            room[row] = row_tokens
            if len(room) > open_rows:
                del room[min(room, key=lambda r: (room[r], r))]
        rows[row].append(record)
        room[row] -= lengths[record]
    return [rows[i] for i in generator.permutation(len(rows))]


def batches(
    lengths: Sequence[int], row_tokens: int, batch_rows: int, *, seed: int
) -> Iterator[list[list[int]]]:
    """Endless optimizer steps, each a list of rows of record indices; no record is left out."""
    epoch = 0
    while True:
        rows = plan_rows(lengths, row_tokens, seed=seed, epoch=epoch)
        yield from (rows[i : i + batch_rows] for i in range(0, len(rows), batch_rows))
        epoch += 1
