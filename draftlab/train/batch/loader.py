"""Loading of batches: packed ahead, copied to the GPU on a side stream.

    optimizer steps ─► pack (data workers or threads, pinned memory) ─► copy (a stream) ─► training

Every stage keeps the order, so training sees the same batches for any number of workers.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftlab.formatting import count_text
from draftlab.store.shard_files import RemoteShardFiles
from draftlab.store.store import Store
from draftlab.train.batch.fixed_sizes import FixedSizes
from draftlab.train.batch.loss_rows import joint_reach
from draftlab.train.batch.order import batches
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer, map_tensors
from draftlab.train.batch.window_order import WindowReading
from draftlab.train.batch.workers import WorkerPool
from draftlab.train.distributed.ranks import Ranks, assign_micro_batches

MAX_DEFAULT_WORKERS = 4
"""One worker alone keeps up with small heads; the copies of large heads are bound by memory."""
THREADS = {"cpu": 1, "cuda": 6}
"""Threads that pack where there are no data workers."""
MAX_QUEUED_STEPS = 2
"""Batches whose work may be queued on a GPU: one that runs, one that follows without a gap."""
SAMPLED_STEPS = 16
"""Steps whose rows are counted for `choose_sizes`."""

MAX_ITEMS = 64
"""Steps for which shards at a URL are downloaded ahead."""

Item = TypeVar("Item")
_END: Any = object()


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of an optimizer step, on the device: the `first` or `last` one on this rank, or
    one between. `counts` N_k, `tokens` and `teachers` (positions without padding, and those of the
    target's logits) are of this rank's part of the step.
    """

    batch: Batch
    counts: tuple[int, ...]
    tokens: int
    teachers: int
    first: bool
    last: bool


class BatchLoader:
    """Loads the micro-batches of optimizer steps ahead of the training that uses them."""

    def __init__(self, packer: Packer, ranks: Ranks) -> None:
        self.packer, self.ranks, self.device = packer, ranks, ranks.device
        self.on_gpu = self.device.type == "cuda"
        self.num_workers = packer.settings.data_workers or 0
        if packer.settings.data_workers is None and self.on_gpu:
            # Half of this GPU's share of the CPU cores.
            cores = len(os.sched_getaffinity(0)) // ranks.local_gpus
            self.num_workers = max(1, min(MAX_DEFAULT_WORKERS, cores // 2))
        self.window = WindowReading(packer)
        self._pool: WorkerPool | None = None

    def start_workers(self) -> None:
        """Start the data workers, if any; the end of `micro_batches` ends them, or `close`."""
        if self.num_workers:
            self._pool = WorkerPool(self.num_workers, pinned=self.on_gpu)

    def close(self) -> None:
        """End data workers that no `micro_batches` has, as where training fails before it."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def describe(self) -> str:
        """Return what packs batches, for the console."""
        return count_text(self.num_workers, "data worker") if self.num_workers else "threads"

    def steps(self, records: Sequence[int] | np.ndarray, *, first: int) -> Iterator[OptimizerStep]:
        """Yield this process's share of the optimizer steps on some records (no held-out ones)."""
        steps, processes = self._steps(records, first), self.ranks.local_gpus
        return fetch_ahead(steps, OptimizerStep.records, self.packer.store, processes=processes)

    def _steps(self, records: Sequence[int] | np.ndarray, first: int) -> Iterator[OptimizerStep]:
        if (window := self.window.order) is not None:
            yield from self.window.steps(window, first, self.ranks)
            return
        settings, seed, records = self.packer.settings, self.packer.seed, np.asarray(records)
        lengths = np.asarray(self.packer.store.lengths)[records]
        sizes = settings.row_tokens, settings.batch_rows
        order = batches(lengths, *sizes, seed=seed, first=first)
        for step, rows in zip(range(first, settings.steps), order, strict=False):
            chosen = [records[row].tolist() for row in rows]
            micro_batches = assign_micro_batches(chosen, settings.micro_rows, self.ranks)
            yield OptimizerStep(step, micro_batches)

    def choose_sizes(self, records: Sequence[int] | np.ndarray, height: int) -> FixedSizes:
        """Return `FixedSizes.choose` for `Packer.sizes`, by the first steps of the training: one
        that resumes has the same.
        """
        store, settings = self.packer.store, self.packer.settings
        steps = islice(self.steps(records, first=0), SAMPLED_STEPS)
        reaches = (
            joint_reach([store.tokens_and_spans(i)[1] for i in step.records()]) for step in steps
        )
        most = settings.row_tokens * settings.batch_rows
        return FixedSizes.choose(reaches, most, settings.ttt_steps, height)

    def micro_batches(self, steps: Iterable[OptimizerStep]) -> Generator[MicroBatch, None, None]:
        """Yield the micro-batches of the steps in order, on the device, loaded ahead.

        Threads and data workers end with the generator: close it. Raises as `WorkerPool.pack`.
        """
        loaded = _micro_batches(self._packed(steps))
        if not self.on_gpu:
            return prefetch(loaded)
        return _wait_for_copies(prefetch(_start_copies(loaded, self.device)), self.device)

    def _packed(self, steps: Iterable[OptimizerStep]) -> Generator[list[Batch], None, None]:
        """Yield the packed micro-batches of each step, in pinned memory for a GPU."""
        if not self.num_workers:
            num_threads = THREADS.get(self.device.type, 1)
            yield from map_in_threads(self.window.waiting(self._pack_here), steps, num_threads)
            return
        if self._pool is None:
            self.start_workers()
        self._pool.begin(self.packer)
        pool, self._pool = self._pool, None
        packed_ahead = map_in_threads(self.window.waiting(pool.pack), steps, self.num_workers)
        with closing(pool), closing(packed_ahead) as packed:
            for batches in packed:
                yield batches if self.on_gpu else [batch.dequantised() for batch in batches]

    def _pack_here(self, step: OptimizerStep) -> list[Batch]:
        batches = self.packer[step]
        if not self.on_gpu:
            return [batch.dequantised() for batch in batches]
        return [map_tensors(batch, Tensor.pin_memory) for batch in batches]


def _micro_batches(packed: Generator[list[Batch], None, None]) -> Generator[MicroBatch, None, None]:
    with closing(packed):
        for batches in packed:
            counts = tuple(map(sum, zip(*(batch.counts for batch in batches), strict=True)))
            tokens = sum(batch.num_tokens for batch in batches)
            teachers = sum(0 if batch.idle else batch.num_teachers for batch in batches)
            of_step = counts, tokens, teachers
            for number, batch in enumerate(batches, 1):
                yield MicroBatch(batch, *of_step, number == 1, number == len(batches))


def map_in_threads(
    function: Callable[[Any], Item], items: Iterable[Any], num_threads: int
) -> Generator[Item, None, None]:
    """Yield function(item) of each item in order; so many threads work ahead."""
    with ThreadPoolExecutor(num_threads, "pack") as pool:
        started: deque[Future[Item]] = deque()
        try:
            for item in items:
                started.append(pool.submit(function, item))
                if len(started) > num_threads + 1:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


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


def fetch_ahead(
    items: Iterable[Item],
    records_of: Callable[[Item], Sequence[int]],
    store: Store,
    *,
    processes: int = 1,
) -> Iterator[Item]:
    """Yield items; for a store at a URL, begin to download the shards of the following ones.

    The shards in sight take at most half of the cache, so that none leaves it before it is used.

    Args:
        records_of: returns the records that an item, such as an optimizer step, reads.
        processes: how many processes of this machine share the cache in this way.
    """
    if not isinstance(store.files, RemoteShardFiles):
        yield from items
        return
    max_bytes = store.files.cache.max_bytes // (2 * processes)
    shards, waiting, items = store.manifest.shards, deque[tuple[Item, list[int]]](), iter(items)
    uses: Counter[int] = Counter()  # of the shards in sight
    downloads: list[Future[None]] = []
    total = 0
    try:
        while True:
            while len(waiting) < MAX_ITEMS and total < max_bytes:
                if (item := next(items, _END)) is _END:
                    break
                numbers = store.shards_of(records_of(item))
                new = [shards[number] for number in numbers if not uses[number]]
                downloads = [one for one in downloads if not one.done()] + store.files.fetch(new)
                uses.update(numbers)
                total += sum(shard.bytes or 0 for shard in new)
                waiting.append((item, numbers))
            if not waiting:
                return
            item, numbers = waiting.popleft()
            yield item
            for number in numbers:
                uses[number] -= 1
                total -= (shards[number].bytes or 0) * (uses[number] == 0)
    finally:
        for download in downloads:  # its own: a validation fetches while a training does
            download.cancel()
