"""How conversations share rows of a batch (methods §1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftlab.kernels.distill_plan import RowPlan, plan_rows
from draftlab.kernels.noise import prompt_key
from draftlab.store.fp8 import E4M3, dequantise
from draftlab.store.store import Record
from draftlab.train.batch.feature_noise import FeatureNoise, StepNoise
from draftlab.train.batch.loss_rows import StepRows, deal, joint_reach, step_rows

Room = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor of a shape and dtype, holding anything, where a batch is to lie."""


def anywhere(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in ordinary memory."""
    return torch.empty(tuple(shape), dtype=dtype)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor in pages that a GPU reads while the host goes on."""
    return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


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
        """The batch on a device, features decoded; tensors of one memory are copied as one."""
        # By address, since views of one memory may each have another object for it; the memory is
        # kept with its copy, so that no other has its address meanwhile.
        moved: dict[int, tuple[Any, Tensor]] = {}

        def move(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in moved:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
                moved[memory.data_ptr()] = memory, whole.to(device, non_blocking=True)
            _, copy = moved[memory.data_ptr()]
            copy = copy.view(tensor.dtype)
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


def pack(
    records: Sequence[Sequence[Record]],
    row_tokens: int,
    num_steps: int,
    *,
    keep: Callable[[Record], Tensor] | None = None,
    noise: StepNoise | None = None,
    passes: int = 1,
    room: Room | None = None,
    one_row: bool = False,
    idle: bool = False,
) -> Batch:
    """Builds a batch from the records of each row; rows are trimmed to the longest one.

    Args:
        keep: how many steps each position of a record may have at most, int64 [T]; None: all.
        noise: on the features; None: there is none.
        passes: parts that the anchors are dealt to, to be run one after the other: less memory, the
            same sum of losses.
        room: where it is to lie, to be copied to a device: its integers in one tensor, features of
            an fp8 store as codes. None: anywhere, decoded.
        one_row: whether all rows become one, in which none is padded to the longest of a step.
        idle: see `Batch`.
    """
    flat = [record for row in records for record in row]
    if one_row:
        records, row_tokens = [flat], len(records) * row_tokens
    sizes = [[len(record.tokens) for record in row] for row in records]
    totals = [sum(row) for row in sizes]
    width = max(totals)
    if width > row_tokens:
        raise ValueError(f"a row of {width} tokens exceeds row_tokens {row_tokens}")

    def lay(
        rows: Sequence[Sequence[Tensor]], dtype: torch.dtype | None = None, rest: int = 0
    ) -> Tensor:
        """[B, S, …] of each row's tensors [T, …], one behind the other, and `rest` behind them."""
        like = rows[0][0]
        shape = (len(rows), width, *like.shape[1:])
        whole = (room or anywhere)(shape, dtype or like.dtype)
        for row, values, total in zip(_array(whole), rows, totals, strict=True):
            np.concatenate([_array(value) for value in values], out=row[:total])
            row[total:] = rest
        return whole

    def every(name: str) -> list[list[Tensor]]:
        return [[getattr(record, name) for record in row] for row in records]

    def lay_joint(values: Tensor, rest: int = 0) -> Tensor:
        """[B, S] of what belongs to all records, one behind the other."""
        return lay([[part] for part in values.split(totals)], rest=rest)

    def lay_numbers(numbers: Sequence[float], dtype: torch.dtype, rest: int = 0) -> Tensor:
        """[B, S] of a number for each record."""
        return lay_joint(torch.tensor(numbers, dtype=dtype).repeat_interleave(lengths), rest)

    lengths = torch.tensor([size for row in sizes for size in row])
    reach = joint_reach(flat)
    if keep is not None:
        reach = reach.minimum(torch.cat([keep(record) for record in flat]))
    reach = lay_joint(reach)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    added = None
    if noise is not None:
        keys = lay_numbers([prompt_key(r.id) for r in flat], torch.int64)
        largest = lay_numbers([noise.scale(len(r.tokens)) for r in flat], torch.float32)
        added = FeatureNoise(noise.key(), keys, largest)
    steps = tuple(step_rows(part, num_steps) for part in deal(reach, num_steps, passes))
    batch = Batch(
        lay(every("tokens"), torch.int64),
        lay_numbers([n for row in sizes for n in range(len(row))], torch.int64, rest=-1),
        lay_joint(torch.arange(len(starts)) - starts),
        lay(every("features")),
        lay(every("last")),
        lay(every("logsumexp")),
        lay(every("argmax"), torch.int64),
        steps,
        tuple(plan_rows(torch.cat([rows.teacher for rows in each])) for each in steps),
        len(flat),
        0 if idle else sum(totals),
        added,
        idle,
        None if flat[0].scales is None else lay(every("scales")),
    )
    return batch.decoded() if room is None else _gathered(batch, room)


def _array(tensor: Tensor) -> np.ndarray:
    """A tensor's memory; of dtypes that numpy lacks, their bits.

    numpy copies on the thread that asks. torch would start others, which the packing threads have
    no use for.
    """
    bits = {torch.bfloat16: torch.int16, E4M3: torch.uint8}.get(tensor.dtype)
    return (tensor if bits is None else tensor.view(bits)).numpy()


def _gathered(batch: Batch, room: Room) -> Batch:
    """The batch with all its integers in one tensor, to be copied at once."""
    found: list[Tensor] = []
    map_tensors(batch, lambda t: found.append(t) or t)
    integers = {id(t): t for t in found if t.dtype == torch.int64}
    sizes = [t.numel() for t in integers.values()]
    whole = room((sum(sizes),), torch.int64)
    views = dict(zip(integers, whole.split(sizes), strict=True))
    for key, tensor in integers.items():
        views[key] = views[key].view(tensor.shape).copy_(tensor)
    return map_tensors(batch, lambda t: views.get(id(t), t))
