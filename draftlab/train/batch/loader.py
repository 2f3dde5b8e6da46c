"""Loading of batches: packed in data workers, copied to the GPU on a side stream.

    optimizer steps ─► DataLoader (workers pack, pinned memory) ─► copy on a stream ─► training

Every stage keeps the order, so training sees the same batches for any number of workers.
"""

from __future__ import annotations

import atexit
import math
import os
import pickle
import shutil
import signal
import sys
import traceback
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import UntypedStorage
from torch.utils.data import DataLoader, Dataset

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.train.batch.packer import OptimizerStep, Packer
from draftlab.train.batch.packing import Batch, map_tensors

if TYPE_CHECKING:  # a data worker does not need it, and would import it for seconds
    from draftlab.train.distributed.ranks import Ranks

MAX_DEFAULT_WORKERS = 4
"""One worker alone keeps up with small heads; the copies of large heads are bound by memory."""
MAX_QUEUED_STEPS = 2
"""Batches whose work may be queued on a GPU: one that runs, one that follows without a gap."""
SHARED_MEMORY = "/dev/shm"
_WORKER_ENVIRONMENT = {"PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}

Item = TypeVar("Item")
_END: Any = object()


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of an optimizer step, on the device.

    Attributes:
        counts, tokens: N_k and the positions without padding of this rank's part of the step.
        first, last: whether it is the first or last one of the step on this rank.
    """

    batch: Batch
    counts: tuple[int, ...]
    tokens: int
    first: bool
    last: bool


class BatchLoader:
    """Loads the micro-batches of optimizer steps ahead of the training that uses them.

    Args:
        packer: the data set.
        ranks: its device is where batches go; its ranks on this machine share the CPU cores.

    Raises:
        UserError: `train.data_workers` asks for workers where none can work.
    """

    def __init__(self, packer: Packer, ranks: Ranks) -> None:
        self.packer, self.device = packer, ranks.device
        self.block_bytes = packer.max_step_bytes(ranks.size)
        self.num_workers = _choose_num_workers(packer, ranks, self.block_bytes)

    def describe(self) -> str:
        """Return where batches are packed, for the console."""
        return count_text(self.num_workers, "data worker") if self.num_workers else "this process"

    def micro_batches(self, steps: Iterable[OptimizerStep]) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches of the steps in order, on the device, loaded ahead.

        Data workers end with the generator: close it.

        Raises:
            UserError: a data worker ended. Also raises whatever packing raises.
        """
        loaded = _micro_batches(self._packed(steps))
        if self.device.type != "cuda":
            return prefetch(loaded)
        return _wait_for_copies(prefetch(_start_copies(loaded, self.device)), self.device)

    def _packed(self, steps: Iterable[OptimizerStep]) -> Generator[list[Batch], None, None]:
        """Yield the packed micro-batches of each step, in pinned memory for a GPU."""
        on_gpu, workers = self.device.type == "cuda", self.num_workers
        slots = workers + 1
        loader = DataLoader(
            _WorkerPacker(self.packer, slots, self.block_bytes) if workers else self.packer,
            batch_size=None,
            # A worker packs step i + workers + 1 when step i has left its block.
            sampler=zip(cycle(range(slots)), steps, strict=False) if workers else steps,
            num_workers=workers,
            prefetch_factor=1 if workers else None,  # a step may have gigabytes
            pin_memory=on_gpu,
            # A forked process cannot use CUDA, nor locks that other threads hold.
            multiprocessing_context="spawn" if workers else None,
            worker_init_fn=_prepare_worker,
            generator=torch.Generator(),  # or it would draw from the global one
        )
        with _worker_start(), torch.cuda.device(self.device) if on_gpu else nullcontext():
            packed = iter(loader)
        lost = None
        try:
            while True:
                try:
                    batches = next(packed, None)
                except (RuntimeError, OSError, EOFError) as error:
                    if not workers:
                        raise
                    lost = f"{type(error).__name__}: {error}"
                if batches is None or lost:
                    break
                if isinstance(batches, Exception):
                    raise batches
                yield batches if on_gpu else [_on_cpu(batch, workers > 0) for batch in batches]
        finally:
            del packed  # ends the workers
        if lost:
            raise UserError(
                f"a data worker ended ({lost})",
                do=f"check whether memory or {SHARED_MEMORY} is full, and run the same command "
                "again; train.data_workers=0 packs batches in the process that trains",
            )


class _WorkerPacker(Dataset[Any]):
    """A `Packer` in a data worker: opens the store on first use, and returns its errors.

    DataLoader would raise an error of the same type with a traceback as its only argument.

    Args:
        num_blocks, block_bytes: blocks of shared memory, each for the batches of a step. Processes
            keep them mapped: new memory for each batch would cost the process that trains as much
            time as a small step.
    """

    def __init__(self, packer: Packer, num_blocks: int, block_bytes: int) -> None:
        self.packer: Packer | bytes = pickle.dumps(packer)
        self.blocks = [UntypedStorage._new_shared(block_bytes) for _ in range(num_blocks)]

    def __getitem__(self, slot_and_step: tuple[int, OptimizerStep]) -> list[Batch] | Exception:
        slot, step = slot_and_step
        try:
            if isinstance(self.packer, bytes):
                self.packer = pickle.loads(self.packer)
            batches = self.packer[step]
            block = torch.empty(0, dtype=torch.uint8).set_(self.blocks[slot])
            sizes = [batch.num_bytes for batch in batches]
            parts = block[: sum(sizes)].split(sizes)
            return [batch.copy_to(part) for batch, part in zip(batches, parts, strict=True)]
        except Exception as error:
            sent: Exception = error
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:
                sent = RuntimeError(repr(error))  # of an error that cannot be pickled
            sent.add_note(f"in a data worker:\n{traceback.format_exc()}")
            return sent


def _on_cpu(batch: Batch, in_block: bool) -> Batch:
    """Return a batch for training on the CPU, whose memory no worker writes to."""
    if in_block:
        batch = batch.copy_to(torch.empty(batch.num_bytes, dtype=torch.uint8))
    return batch.dequantised()


def _prepare_worker(_: int) -> None:
    """Leave Ctrl-C to the process that trains, and end as forked workers do.

    At the interpreter's own end, a thread that still sends a batch would abort the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(os._exit, 0)


@contextmanager
def _worker_start() -> Iterator[None]:
    """Start processes without the user's script, the working directory's modules and the GPUs.

    A spawned process runs the main module again, and Python looks for modules in the working
    directory first.
    """
    main, environment = sys.modules["__main__"], {n: os.environ.get(n) for n in _WORKER_ENVIRONMENT}
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(_WORKER_ENVIRONMENT)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in environment.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _micro_batches(packed: Generator[list[Batch], None, None]) -> Generator[MicroBatch, None, None]:
    with closing(packed):
        for batches in packed:
            counts = tuple(map(sum, zip(*(batch.counts for batch in batches), strict=True)))
            tokens = sum(batch.num_tokens for batch in batches)
            for number, batch in enumerate(batches, 1):
                yield MicroBatch(batch, counts, tokens, number == 1, number == len(batches))


def prefetch(items: Generator[Item, None, None]) -> Generator[Item, None, None]:
    """Yield the items; a thread prepares the next one meanwhile."""
    with closing(items), ThreadPoolExecutor(1, "prefetch") as thread:
        following = thread.submit(next, items, _END)
        while (item := following.result()) is not _END:
            following = thread.submit(next, items, _END)
            yield item


def _start_copies(
    micro_batches: Generator[MicroBatch, None, None], device: torch.device
) -> Generator[tuple[MicroBatch, torch.cuda.Event], None, None]:
    """Copy each micro-batch to the GPU on a stream, and yield it with the event of its arrival."""
    stream = torch.cuda.Stream(device)
    with closing(micro_batches):
        for micro in micro_batches:
            with torch.cuda.stream(stream):
                batch = micro.batch.to(device)
            yield replace(micro, batch=batch), stream.record_event()


def _wait_for_copies(
    micro_batches: Generator[tuple[MicroBatch, torch.cuda.Event], None, None], device: torch.device
) -> Generator[MicroBatch, None, None]:
    """Yield micro-batches; the current stream waits for the arrival of each, the host does not."""
    queued: deque[torch.cuda.Event] = deque()
    with closing(micro_batches):
        for micro, arrival in micro_batches:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(arrival)
            # The memory belongs to the copying stream, which must not reuse it too early.
            map_tensors(micro.batch, lambda t, stream=stream: t.record_stream(stream))
            yield micro
            # A host that ran far ahead would fill the GPU's memory with batches.
            queued.append(stream.record_event())
            if len(queued) == MAX_QUEUED_STEPS:
                queued.popleft().synchronize()


def _choose_num_workers(packer: Packer, ranks: Ranks, block_bytes: int) -> int:
    requested = packer.settings.data_workers
    if requested == 0 or (requested is None and ranks.device.type != "cuda"):
        return 0
    if not packer.store.on_disk:
        reason = "a data worker cannot open this store, which is no folder (record.online)"
    else:
        number = requested or default_num_workers(ranks.local_gpus)
        needed = (number + 1) * block_bytes * ranks.local_gpus
        free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else math.inf
        if needed <= free:
            return number
        reason = (
            f"batches need about {needed / 2**30:.1f} GiB of {SHARED_MEMORY}, found "
            f"{free / 2**30:.1f} GiB free"
        )
    if requested:
        raise UserError(
            f"train.data_workers asks for {count_text(requested, 'data worker')}, and {reason}",
            where="train.data_workers",
            do="set it to 0, or leave it out",
        )
    return 0


def default_num_workers(num_gpus: int) -> int:
    """Return the data workers of one GPU: half of its share of this machine's CPU cores."""
    cores = len(os.sched_getaffinity(0)) // num_gpus
    return max(1, min(MAX_DEFAULT_WORKERS, cores // 2))
