"""The processes of a training: which one this is, and what their hosts tell each other.

Whoever starts them (`draftlab train --gpus N`, torchrun, accelerate launch) sets RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Gradients travel by NCCL on GPUs and by gloo on a CPU. What
hosts tell each other always goes by a gloo group of its own: there a rank may wait for hours while
rank 0 answers prompts, where NCCL would give up after minutes, and learns at once when one dies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor

from draftlab.errors import UserError
from draftlab.target_model.locate import resolve_device

T = TypeVar("T")
STARTED = "WORLD_SIZE"
"""Environment variable: how many processes were started together."""
PATIENCE = timedelta(days=30)
"""How long hosts wait for one that is alive."""
_MOMENT = 0.1
"""Seconds, in which this process leaves Python to its other threads."""
HOW = "start them with `draftlab train RECIPE --gpus N`, torchrun or accelerate launch"


@dataclass(frozen=True)
class Ranks:
    """This process among those that work together.

    Attributes:
        rank, size: its number, and how many there are.
        device: what it trains on.
        hosts: the group in which hosts talk; None for a process alone, or one that left.
    """

    rank: int
    size: int
    device: torch.device
    hosts: Any = None

    @classmethod
    def join(cls, device: str) -> Ranks:
        """Joins the processes that were started with this one; alone if none were.

        Args:
            device: `train.device`.

        Raises:
            UserError: one device named for all of them, fewer GPUs than processes, or a launcher
                whose processes do not find each other.
        """
        started, wanted = started_together(), resolve_device(device)
        if started == 1:
            return cls(0, 1, wanted)
        if wanted.type == "cuda":
            local, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if wanted.index is not None:
                raise UserError(
                    f"{started} processes train, and train.device names one device for all: "
                    f"{device}",
                    do="use train.device: auto, which gives each process a GPU of its own",
                )
            if local >= there:
                raise UserError(
                    f"expected a GPU for each process, found {there} for process {local} (from 0)",
                    do=f"start {there} processes on this machine",
                )
        state = PartialState(cpu=wanted.type == "cpu")
        if state.num_processes != started:
            raise UserError(
                f"{started} processes were started, and accelerate joined {state.num_processes}",
                do=HOW,
            )
        hosts = dist.new_group(backend="gloo", timeout=PATIENCE)
        return cls(state.process_index, state.num_processes, state.device, hosts)

    def leave(self) -> None:
        """Parts from the others, once nothing is left to say.

        A thread of gloo that still lets go of its last tensor while Python exits aborts the
        process (1 of 50 on a busy CPU). Threads of `hosts` end with the last reference to it; those
        of groups that FSDP2 and DeepSpeed hold are given a moment.
        """
        if self.size > 1:
            dist.destroy_process_group()
            object.__setattr__(self, "hosts", None)
            time.sleep(_MOMENT)

    @property
    def gpus_here(self) -> int:
        """How many GPUs of this machine train; at least 1."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.device.type == "cuda" else 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks of a tensor on the CPU, in place."""
        if self.size > 1:
            with self.together():
                dist.all_reduce(numbers, group=self.hosts)
        return numbers

    def told(self, value: T) -> T:
        """Rank 0's value, on every rank; the others wait for it as long as it takes."""
        if self.size == 1:
            return value
        box = [value]
        with self.together():
            dist.broadcast_object_list(box, src=0, group=self.hosts)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self.together():
            dist.all_gather_object(values, value, group=self.hosts)
        return values

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do together: the death of another one becomes the user's error."""
        try:
            yield
        except RuntimeError as error:
            # gloo's errors have no type of their own.
            lost = isinstance(error, dist.DistError) or "gloo/" in str(error)
            if self.size == 1 or not lost:
                raise
            raise UserError(
                f"rank {self.rank} of {self.size} lost another process: {error}",
                do="that process's log says why it ended; the same command goes on from the last "
                "checkpoint",
            ) from None


def started_together() -> int:
    """How many processes were started with this one, itself included."""
    return int(os.environ.get(STARTED, "1"))


def check_gpus(count: int, device: str) -> None:
    """Refuses to start more processes than there are GPUs, or any from one of them.

    Args:
        count: of processes. device: `train.device`; a CPU has room for any number.
    """
    there = torch.cuda.device_count()
    if started_together() > 1:
        raise UserError("a process started with others cannot start more", where="--gpus", do=HOW)
    if device == "cpu" or (resolve_device(device).type == "cuda" and count <= there):
        return
    raise UserError(
        f"expected {count} GPUs, found {there}",
        where="--gpus",
        do="ask for fewer; train.device=cpu starts as many processes on the CPU",
    )


def share(items: list[T], size: int | None, ranks: Ranks) -> list[tuple[T, bool]]:
    """Cuts an optimizer step's rows into micro-batches and deals them to the ranks in turn.

    All ranks get equally many, since they reduce gradients together: one that would have fewer runs
    the first of all again, as an idle one.

    Args:
        items: rows of the step, the same on every rank.
        size: rows of a micro-batch; None: as many as give each rank one.

    Returns:
        This rank's micro-batches, and whether each is idle.
    """
    size = size or -(-len(items) // ranks.size)
    micro = [items[at : at + size] for at in range(0, len(items), size)]
    mine = [(rows, False) for rows in micro[ranks.rank :: ranks.size]]
    missing = -(-len(micro) // ranks.size) - len(mine)
    return mine + [(micro[0], True)] * missing
