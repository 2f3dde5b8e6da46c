"""The ranks of a training: which one this process is, and what they exchange on the CPU.

Gradients are reduced by NCCL on GPUs and by gloo on a CPU. Everything else goes through a gloo
group of its own. There a rank may wait for hours while rank 0 answers prompts, where NCCL would
time out after minutes, and notices at once when a rank dies.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from draftlab.errors import UserError
from draftlab.process_environment import launched_number
from draftlab.signals import ENDING_SIGNALS, on_ending_signal
from draftlab.target_model.locate import resolve_device

T = TypeVar("T")
WORLD_SIZE = "WORLD_SIZE"
"""Environment variable: how many processes were launched together."""
TIMEOUT = timedelta(days=30)
"""Of the gloo group: as good as none."""
_THREADS_END = 0.1
"""Seconds that gloo's threads get to end in."""
LAUNCH_HINT = "start them with `draftlab train RECIPE --gpus N`, torchrun or accelerate launch"


class LostRankError(UserError):
    """Another rank has died."""


@dataclass(frozen=True)
class Ranks:
    """This process among the ranks of a training.

    Attributes:
        cpu_group: the gloo group; None for a single process, or after `leave`.
    """

    rank: int
    size: int
    device: torch.device
    cpu_group: Any = None

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Join the processes that were launched with this one, if any; raise a `UserError` if
        `train.device` names one device for all, or there are fewer GPUs than processes.
        """
        launched, resolved = num_launched(), resolve_device(device)
        if launched == 1:
            return cls(0, 1, resolved)
        if (rank := launched_number("RANK", 0)) >= launched:
            raise UserError(
                f"expected a RANK below the number of processes, {launched}, found {rank}",
                where="the environment variables RANK and WORLD_SIZE",
                do=LAUNCH_HINT,
            )
        if resolved.type == "cuda":
            local, num_gpus = launched_number("LOCAL_RANK", 0), torch.cuda.device_count()
            if resolved.index is not None:
                raise UserError(
                    f"{launched} processes train, and train.device names one device for all: "
                    f"{device}",
                    do="use train.device: auto, which gives each process a GPU of its own",
                )
            if local >= num_gpus:
                raise UserError(
                    f"expected a GPU for each process, found {num_gpus} for process {local} "
                    "(from 0)",
                    do=f"start {num_gpus} processes on this machine",
                )
            resolved = torch.device("cuda", local)
            torch.cuda.set_device(resolved)
        if not dist.is_initialized():  # Ray Train has done it
            try:
                dist.init_process_group("nccl" if resolved.type == "cuda" else "gloo")
            except ValueError as error:  # a variable of the environment is missing
                raise UserError(
                    f"{launched} processes were launched, which do not find each other: {error}",
                    where="the environment variables of the launcher",
                    do=LAUNCH_HINT,
                ) from None
        cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        return cls(dist.get_rank(), launched, resolved, cpu_group)

    def leave(self) -> None:
        """Destroy the process groups, after the last collective.

        A thread of gloo that releases its last tensor while Python exits aborts the process. The
        threads of `cpu_group` end with the last reference to it; those of FSDP2's and DeepSpeed's
        groups get a moment.
        """
        if self.size > 1:
            dist.destroy_process_group()
            object.__setattr__(self, "cpu_group", None)
            time.sleep(_THREADS_END)

    @property
    def local_gpus(self) -> int:
        """The number of GPUs of this machine that train; at least 1."""
        return num_launched_here() if self.device.type == "cuda" else 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum a CPU tensor over all ranks, in place, and return it."""
        if self.size > 1:
            with self.report_lost_rank():
                dist.all_reduce(tensor, group=self.cpu_group)
        return tensor

    def broadcast(self, value: T) -> T:
        """Broadcast rank 0's value over the gloo group, without a timeout."""
        if self.size == 1:
            return value
        values = [value]
        with self.report_lost_rank():
            dist.broadcast_object_list(values, src=0, group=self.cpu_group)
        return values[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.report_lost_rank():
            dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    @contextmanager
    def report_lost_rank(self) -> Iterator[None]:
        """Raise a `LostRankError` where a collective fails since another rank died."""
        try:
            yield
        except RuntimeError as error:
            # gloo's errors have no type of their own.
            lost = isinstance(error, dist.DistError) or "gloo/" in str(error)
            if self.size == 1 or not lost:
                raise
            raise LostRankError(
                f"rank {self.rank} of {self.size} lost another process: {error}",
                do="look in that process's log why it ended; the same command resumes from the "
                "last checkpoint",
            ) from None


def num_launched() -> int:
    """Return how many processes were launched together, including this one."""
    return launched_number(WORLD_SIZE, 1)


def num_launched_here() -> int:
    """Return how many of them are on this machine."""
    return launched_number("LOCAL_WORLD_SIZE", 1)


def check_gpus(count: int, device: str) -> None:
    """Raise a `UserError` if this process cannot launch `count` processes on `train.device`."""
    num_gpus = torch.cuda.device_count()
    if num_launched() > 1:
        raise UserError(
            "a process launched with others cannot start more", where="--gpus", do=LAUNCH_HINT
        )
    if device == "cpu" or (resolve_device(device).type == "cuda" and count <= num_gpus):
        return
    raise UserError(
        f"expected {count} GPUs, found {num_gpus}",
        where="--gpus",
        do="ask for fewer; train.device=cpu starts as many processes on the CPU",
    )


def assign_micro_batches(
    rows: list[T], micro_rows: int | None, ranks: Ranks
) -> list[tuple[list[T], bool]]:
    """Split an optimizer step's rows into micro-batches, and assign them to ranks in turn.

    The ranks run as few micro-batches each as `micro_rows` (None: no limit) allows, and the step
    has as many as give work to all of them. All ranks get equally many, since they reduce gradients
    together: where rows are too few, a rank runs the first micro-batch again, as an idle one.
    Returns this rank's micro-batches, and whether each is idle.
    """
    of_rank = -(-len(rows) // ((micro_rows or len(rows)) * ranks.size))
    count = min(len(rows), of_rank * ranks.size)
    ends = [len(rows) * number // count for number in range(count + 1)]
    micro = [rows[start:end] for start, end in pairwise(ends)]
    assigned = [(batch, False) for batch in micro[ranks.rank :: ranks.size]]
    return assigned + [(micro[0], True)] * (of_rank - len(assigned))


def idle_note(batch_rows: int, num_ranks: int) -> str | None:
    """Return a remark if some of the ranks have no row of a step, or fewer than others."""
    if batch_rows % num_ranks == 0:
        return None
    effect = "some processes have a row more than others, which wait for them"
    if batch_rows < num_ranks:
        effect = f"{num_ranks - batch_rows} of {num_ranks} processes have nothing to do"
    return (
        f"{effect}, since a step has {batch_rows} rows: a train.batch_rows that is a multiple of "
        f"{num_ranks} uses all of them"
    )


class EndingSignal:
    """A SIGTERM or SIGHUP that any rank received: `agreed`, equal on all ranks after a `sum`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.agreed: signal.Signals | None = None
        self._received: list[int] = []

    def postponed(self) -> AbstractContextManager[None]:
        """Return a block in which signals do not end the process."""
        return on_ending_signal(self._received.append)

    def sum(self, numbers: list[int]) -> list[int]:
        """Return the sums of numbers over all ranks, which agree on a signal on this occasion."""
        flags = [int(number in self._received) for number in ENDING_SIGNALS]
        sums = self.ranks.all_reduce(torch.tensor([*numbers, *flags])).tolist()
        received = zip(ENDING_SIGNALS, sums[len(numbers) :], strict=True)
        self.agreed = next((number for number, count in received if count), None)
        return sums[: len(numbers)]
