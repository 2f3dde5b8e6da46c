"""Which predictions carry loss, and how conversations share rows of a batch (METHODS §1, §2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.data.fp8 import E4M3, dequantise
from draftlab.data.noise import FeatureNoise, StepNoise
from draftlab.data.store import Record
from draftlab.kernels.distill_plan import RowPlan, plan_rows
from draftlab.kernels.noise import prompt_key


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
        origin: int64 [n], which of the previous step's real ones they are (step 0: b·S + t).
    """

    select: Tensor
    index: Tensor
    loss: Tensor
    teacher: Tensor
    origin: Tensor


@dataclass(frozen=True)
class Batch:
    """Conversations packed into B rows of S positions; `documents` keeps them apart.

    Attributes:
        tokens, documents, positions: int64 [B, S]; document −1 is padding; positions restart with
            each conversation.
        features: [B, S, F]; with `scales` (float32 [B, S, b]) they are codes of fp8, which `to`
            turns into features on the device: half the bytes to copy, and work that it does faster.
        last: [B, S, Ht]. logsumexp: float32 [B, S]. argmax: int64 [B, S].
        passes: the rows of each step, for each pass over the batch (see `pack`).
        plans: of each pass, all its rows, step after step, by where their teachers are.
        records: how many conversations. num_tokens: how many real positions.
        noise: on what is made from the features; None: there is none.
        idle: whether it counts for nothing: another process trains on the same rows.
    """

    tokens: Tensor
    documents: Tensor
    positions: Tensor
    features: Tensor
    last: Tensor
    logsumexp: Tensor
    argmax: Tensor
    passes: tuple[tuple[StepRows, ...], ...]
    plans: tuple[RowPlan, ...]
    records: int
    num_tokens: int
    noise: FeatureNoise | None = None
    idle: bool = False
    scales: Tensor | None = None

    @property
    def steps(self) -> tuple[StepRows, ...]:
        """The rows of each step, of a batch of one pass."""
        (steps,) = self.passes
        return steps

    @property
    def plan(self) -> RowPlan:
        """In which order the rows of all steps meet their teachers, of a batch of one pass."""
        (plan,) = self.plans
        return plan

    @property
    def counts(self) -> list[int]:
        """N_k: how many positions carry loss at each step, over all passes."""
        found = [sum(len(rows.loss) for rows in step) for step in zip(*self.passes, strict=True)]
        return [0] * len(found) if self.idle else found

    @property
    def num_anchors(self) -> int:
        """Number of w_0 positions, N_0."""
        return self.counts[0]

    def split(self) -> Iterator[Batch]:
        """A batch for each pass; they share all but their rows."""
        for steps, plan in zip(self.passes, self.plans, strict=True):
            yield replace(self, passes=(steps,), plans=(plan,))

    def to(self, device: torch.device) -> Batch:
        """The batch on a device, features decoded; tensors that lie in one are copied as one."""
        moved: dict[int, tuple[Tensor, Tensor]] = {}

        def move(tensor: Tensor) -> Tensor:
            whole = tensor if tensor._base is None else tensor._base
            if id(whole) not in moved:
                moved[id(whole)] = whole, whole.to(device, non_blocking=True)
            _, copy = moved[id(whole)]
            return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        return map_tensors(self, move).decoded()

    def decoded(self) -> Batch:
        """The batch with features that are no codes."""
        if self.scales is None:
            return self
        return replace(self, features=dequantise(self.features, self.scales), scales=None)


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A batch, or part of one, with every tensor changed but those that the host reads."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(part, change) for part in value)
    if isinstance(value, RowPlan):
        return RowPlan(
            change(value.order), change(value.place), change(value.positions), value.host
        )
    if is_dataclass(value):
        parts = vars(value).items()
        return type(value)(**{name: map_tensors(part, change) for name, part in parts})
    return value


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


def pack(
    records: Sequence[Sequence[Record]],
    row_tokens: int,
    num_steps: int,
    *,
    keep: Callable[[Record], Tensor] | None = None,
    noise: StepNoise | None = None,
    passes: int = 1,
    pin: bool = False,
    one_row: bool = False,
    idle: bool = False,
) -> Batch:
    """Builds a batch from the records of each row; rows are trimmed to the longest one.

    Args:
        keep: how many steps each position of a record may have at most, int64 [T]; None: all.
        noise: on the features; None: there is none.
        passes: parts that the anchors are dealt to, to be run one after the other: less memory, the
            same sum of losses.
        pin: whether to make it in pages that a GPU reads while the host goes on.
        one_row: whether all rows become one, in which none is padded to the longest of a step.
        idle: see `Batch`.
    """
    flat = [record for row in records for record in row]
    if one_row:
        records, row_tokens = [flat], len(records) * row_tokens
    places = [(b, span) for b, row in enumerate(records) for span in _spans(row)]
    width = max(span.stop for _, span in places)
    if width > row_tokens:
        raise ValueError(f"a row of {width} tokens exceeds row_tokens {row_tokens}")

    def lay(values: Sequence[Tensor], dtype: torch.dtype | None = None, rest: int = 0) -> Tensor:
        """[B, S, …] of a tensor [T, …] a record, `rest` behind the last one of a row."""
        shape = (len(records), width, *values[0].shape[1:])
        whole = torch.empty(shape, dtype=dtype or values[0].dtype, pin_memory=pin)
        array, stops = _array(whole), [0] * len(records)
        for (b, span), value in zip(places, values, strict=True):
            array[b, span], stops[b] = _array(value), span.stop
        for b, stop in enumerate(stops):
            array[b, stop:] = rest
        return whole

    slots = [torch.arange(len(r.tokens)) for r in flat]
    reaches = [loss_reach(r.spans.long()) for r in flat]
    if keep is not None:
        reaches = [reach.minimum(keep(r)) for reach, r in zip(reaches, flat, strict=True)]
    reach = lay(reaches)
    in_row = [number for row in records for number in range(len(row))]
    numbers = [torch.full_like(at, n) for n, at in zip(in_row, slots, strict=True)]
    added = None
    if noise is not None:
        keys = [torch.full_like(at, prompt_key(r.id)) for at, r in zip(slots, flat, strict=True)]
        scales = [torch.full(at.shape, noise.scale(len(at))) for at in slots]
        added = FeatureNoise(noise.key(), lay(keys), lay(scales))
    steps = tuple(step_rows(part, num_steps) for part in deal(reach, num_steps, passes))
    batch = Batch(
        lay([r.tokens for r in flat], torch.int64),
        lay(numbers, rest=-1),
        lay(slots),
        lay([r.features for r in flat]),
        lay([r.last for r in flat]),
        lay([r.logsumexp for r in flat]),
        lay([r.argmax for r in flat], torch.int64),
        steps,
        tuple(plan_rows(torch.cat([rows.teacher for rows in each])) for each in steps),
        len(flat),
        0 if idle else sum(len(at) for at in slots),
        added,
        idle,
        None if flat[0].scales is None else lay([r.scales for r in flat]),
    )
    return _gathered(batch) if pin else batch.decoded()


def _spans(row: Sequence[Record]) -> Iterator[slice]:
    """Where the records of a row lie."""
    start = 0
    for record in row:
        yield slice(start, start + len(record.tokens))
        start += len(record.tokens)


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's memory; of dtypes that numpy lacks, their bits.

    numpy copies on the thread that asks. torch would start others, which the packing threads have
    no use for.
    """
    bits = {torch.bfloat16: torch.int16, E4M3: torch.uint8}.get(tensor.dtype, tensor.dtype)
    return tensor.view(bits).numpy()


def _gathered(batch: Batch) -> Batch:
    """The batch with all its integers in one pinned tensor, to be copied at once."""
    found: list[Tensor] = []
    map_tensors(batch, lambda t: found.append(t) or t)
    integers = {id(t): t for t in found if t.dtype == torch.int64}
    sizes = [t.numel() for t in integers.values()]
    whole = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    views = dict(zip(integers, whole.split(sizes), strict=True))
    for key, tensor in integers.items():
        views[key] = views[key].view(tensor.shape).copy_(tensor)
    return map_tensors(batch, lambda t: views.get(id(t), t))
