"""The data set of training: conversations packed into batches (docs/methods.md §1, 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftlab.kernels.distill.plan import RowPlan, plan_rows
from draftlab.kernels.noise import Purpose, keyed_bits, keyed_spread, prompt_key
from draftlab.store.fp8 import E4M3, dequantise
from draftlab.store.store import Record, Store
from draftlab.train.batch.fixed_sizes import FixedSizes, Padding
from draftlab.train.batch.loss_rows import (
    StepRows,
    StepSampling,
    joint_reach,
    split_anchors,
    step_rows,
)
from draftlab.train.settings import TrainSettings

_REFERENCE_LENGTH = 512
"""Tokens of a conversation whose noise is within ±largest; longer ones get less."""


class StepNoise(NamedTuple):
    """The noise settings of an optimizer step: ±largest at 512 tokens, seed and step."""

    largest: float
    seed: int
    step: int


@dataclass(frozen=True)
class FeatureNoise:
    """The noise on a batch, by the `key` of the optimizer step, int64 [].

    Attributes:
        records: int64 [B, S], the `prompt_key` of the record at each position.
        scale: float32 [B, S], the largest noise at each position.
    """

    key: Tensor
    records: Tensor
    scale: Tensor

    def values(self, positions: Tensor, size: int) -> Tensor:
        """Return uniform noise in ±scale, float32 [B, S, size]; positions: int64 [B, S]."""
        keys = keyed_bits(self.key, self.records, positions, Purpose.FEATURE)
        return keyed_spread(keys, size) * self.scale[..., None]


@dataclass(frozen=True)
class Batch:
    """Conversations packed into B rows of S positions; `documents` separates them.

    Attributes:
        tokens, documents, positions: int64 [B, S]; document −1 is padding; positions restart with
            each conversation.
        features: [B, S, F]; with `scales` (float32 [B, S, b]) they are fp8 codes.
        last: [B, S, Ht]. logsumexp: float32 [B, S]. argmax: int64 [B, S].
        passes: the rows of each step, for each pass over the batch (see `pack`).
        plans: for each pass, all its rows ordered by their teachers.
        num_tokens: positions that are not padding.
        noise: on what is made from the features; None: no noise.
        idle: whether the batch counts for nothing, since another rank trains on the same rows.
        padding: which rows carry loss, in a batch of fixed sizes; None: all do.
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
    num_tokens: int
    noise: FeatureNoise | None = None
    idle: bool = False
    scales: Tensor | None = None
    padding: Padding | None = None

    @property
    def steps(self) -> tuple[StepRows, ...]:
        """The rows of each step; the batch must have one pass."""
        (steps,) = self.passes
        return steps

    @property
    def plan(self) -> RowPlan:
        """The order of the rows of all steps by their teachers; the batch must have one pass."""
        (plan,) = self.plans
        return plan

    @property
    def num_teachers(self) -> int:
        """The positions at which the target's logits are computed, over all passes."""
        if self.padding is not None:
            return self.padding.num_teachers
        return sum(len(plan.positions) for plan in self.plans)

    @property
    def counts(self) -> list[int]:
        """N_k: the number of positions with loss at each step, over all passes."""
        if self.padding is not None:
            return [*self.padding.counts]  # of a step in one process, which is not idle
        counts = [sum(len(rows.valid_rows) for rows in s) for s in zip(*self.passes, strict=True)]
        return [0] * len(counts) if self.idle else counts

    @property
    def num_anchors(self) -> int:
        """Number of w_0 positions, N_0."""
        return self.counts[0]

    def split(self) -> Iterator[Batch]:
        """Yield a batch for each pass; they share everything but their rows."""
        for steps, plan in zip(self.passes, self.plans, strict=True):
            yield replace(self, passes=(steps,), plans=(plan,))

    def to(self, device: torch.device) -> Batch:
        """Move the batch to a device, each block of memory by one copy, and dequantise features."""
        # By address: two views of one block may have different storage objects. The block is kept
        # beside its copy, so that no other block gets its address meanwhile.
        moved: dict[int, tuple[Any, Tensor]] = {}

        def move(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in moved:
                block = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                moved[storage.data_ptr()] = storage, block.to(device, non_blocking=True)
            _, copy = moved[storage.data_ptr()]
            copy = copy.view(tensor.dtype)
            return copy.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

        return map_tensors(self, move).dequantised()

    def dequantised(self) -> Batch:
        """Return the batch with features that are not fp8 codes."""
        if self.scales is None:
            return self
        return replace(self, features=dequantise(self.features, self.scales), scales=None)


def uses_one_row(device: torch.device) -> bool:
    """Return whether batches for a device are packed into one row, which has no padding.

    A GPU's attention skips other documents. A CPU's attention computes whole rows, whose cost grows
    with the square of their length.
    """
    return device.type == "cuda"


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a batch but those of `RowPlan.host`."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(map_tensors(item, function) for item in value)
    if is_dataclass(value):
        host = {"host"} if isinstance(value, RowPlan) else set()
        fields = {n: map_tensors(v, function) for n, v in vars(value).items() if n not in host}
        return replace(value, **fields)
    return value


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory as an array; dtypes that numpy lacks become their bits.

    numpy copies on the calling thread. torch would start threads, which packing workers do not
    need.
    """
    bits = {torch.bfloat16: torch.int16, E4M3: torch.uint8}.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def pack(
    records: Sequence[Sequence[Record]],
    row_tokens: int,
    num_steps: int,
    *,
    max_steps: Callable[[Record], Tensor] | None = None,
    noise: StepNoise | None = None,
    num_passes: int = 1,
    one_row: bool = False,
    idle: bool = False,
    sizes: FixedSizes | None = None,
    allocate: Callable[..., Tensor] = torch.empty,
) -> Batch:
    """Pack the records of each row into a batch; rows are trimmed to the longest one.

    Args:
        max_steps: returns how many steps each position of a record may have, int64 [T]; None: all.
        noise: on the features; None: no noise.
        num_passes: parts that the anchors are split into. The passes run one after the other, which
            takes less memory and gives the same sum of losses.
        one_row: whether all rows become one. One row has no padding to the longest row of a step.
        sizes: what a batch of one row and one pass is padded to if it fits; None: it is not.
        allocate: makes the tensors of the largest fields, called like `torch.empty`.

    Returns:
        The batch on the CPU; with fp8 codes if the records have them (`Batch.to` dequantises).
    """
    flat = [record for row in records for record in row]
    if one_row:
        records, row_tokens = [flat], len(records) * row_tokens
    row_lengths = [[len(record.tokens) for record in row] for row in records]
    totals = [sum(row) for row in row_lengths]
    width = max(totals)
    if width > row_tokens:
        raise ValueError(f"a row of {width} tokens exceeds row_tokens {row_tokens}")
    lengths = torch.tensor([length for row in row_lengths for length in row])

    def concatenate(
        rows: Sequence[Sequence[Tensor]],
        dtype: torch.dtype | None = None,
        padding: int = 0,
        allocate: Callable[..., Tensor] = torch.empty,
    ) -> Tensor:
        """Return [B, S, …]: the tensors [T, …] of each row, concatenated and padded."""
        first = rows[0][0]
        out = allocate(len(rows), width, *first.shape[1:], dtype=dtype or first.dtype)
        for row, values, total in zip(as_array(out), rows, totals, strict=True):
            np.concatenate([as_array(value) for value in values], out=row[:total])
            row[total:] = padding
        return out

    def field(name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return [B, S, …] of a field of the records."""
        rows = [[getattr(record, name) for record in row] for row in records]
        return concatenate(rows, dtype, allocate=allocate)

    def by_row(values: Tensor, padding: int = 0) -> Tensor:
        """Return [B, S] of values [Σ T] of all records, concatenated."""
        return concatenate([[part] for part in values.split(totals)], padding=padding)

    def by_record(numbers: Sequence[float], dtype: torch.dtype, padding: int = 0) -> Tensor:
        """Return [B, S] of one number for each record."""
        return by_row(torch.tensor(numbers, dtype=dtype).repeat_interleave(lengths), padding)

    reach = joint_reach([record.spans for record in flat])
    if max_steps is not None:
        reach = reach.minimum(torch.cat([max_steps(record) for record in flat]))
    padding = None
    if sizes is not None and (fixed := sizes.pad(reach)) is not None:
        steps, plan, padding = fixed
        width, passes, plans = sizes.positions, (steps,), (plan,)
    else:
        parts = split_anchors(by_row(reach), num_steps, num_passes)
        passes = tuple(step_rows(part, num_steps) for part in parts)
        plans = tuple(plan_rows(torch.cat([s.teacher_index for s in steps])) for steps in passes)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    feature_noise = None
    if noise is not None:
        keys = by_record([prompt_key(r.id) for r in flat], torch.int64)
        scales = [noise.largest * _REFERENCE_LENGTH / len(r.tokens) for r in flat]
        step = keyed_bits(*torch.tensor([noise.seed, noise.step, 0]), Purpose.FEATURE)
        feature_noise = FeatureNoise(step, keys, by_record(scales, torch.float32))
    return Batch(
        field("tokens", torch.int64),
        by_record([n for row in row_lengths for n in range(len(row))], torch.int64, padding=-1),
        by_row(torch.arange(len(starts)) - starts),
        field("features"),
        field("last"),
        field("logsumexp"),
        field("argmax", torch.int64),
        passes,
        plans,
        0 if idle else sum(totals),
        feature_noise,
        idle,
        None if flat[0].scales is None else field("scales"),
        padding,
    )


Rows = list[list[int]]
"""Record indices of each row."""


class OptimizerStep(NamedTuple):
    """An optimizer step on one rank.

    Attributes:
        micro_batches: rows, and whether idle.
        group: with a window, the last group of shards that the step reads (`WindowStep`).
    """

    number: int
    micro_batches: Sequence[tuple[Rows, bool]]
    group: int = 0

    def records(self) -> list[int]:
        """Return the indices of all records."""
        return [i for rows, _ in self.micro_batches for row in rows for i in row]


@dataclass(frozen=True)
class Packer:
    """Packs the micro-batches of an optimizer step, which are a function of it, by `pack` and the
    fields of an `Objective`.

    A packer can be pickled, and this module imports little, since every data worker imports it.
    """

    store: Store
    settings: TrainSettings
    seed: int
    sampling: StepSampling | None
    imitates_states: bool
    one_row: bool
    sizes: FixedSizes | None = None

    def __getitem__(self, step: OptimizerStep) -> list[Batch]:
        return [self.pack(step.number, rows, idle) for rows, idle in step.micro_batches]

    def pack(
        self, step: int, rows: Rows, idle: bool, allocate: Callable[..., Tensor] = torch.empty
    ) -> Batch:
        """Pack a micro-batch of an optimizer step, by the function `pack`."""
        settings, max_steps = self.settings, None
        if self.sampling is not None:
            options = {"settings": settings, "seed": self.seed, "step": step}
            max_steps = partial(self.sampling.sample, **options)
        noise = StepNoise(settings.noise, self.seed, step)
        return pack(
            self._records(rows),
            settings.row_tokens,
            settings.ttt_steps,
            max_steps=max_steps,
            noise=noise if self.imitates_states and settings.noise else None,
            num_passes=settings.anchor_parts,
            one_row=self.one_row,
            idle=idle,
            sizes=self.sizes,
            allocate=allocate,
        )

    def _records(self, rows: Rows) -> list[list[Record]]:
        """Return the records of a micro-batch, read by one call."""
        records = iter(self.store.views([i for row in rows for i in row]))
        return [list(islice(records, len(row))) for row in rows]
