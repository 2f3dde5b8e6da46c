"""Threads that write shards while the target computes the states of the next ones."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.extraction import StatesFuture, StateSource, check_finite
from draftlab.store.fp8 import relative_errors
from draftlab.store.manifest import Shard, StoreIdentity
from draftlab.store.recording_plan import batches_of
from draftlab.store.resume import Receipts
from draftlab.store.sample_table import Sample
from draftlab.tensor_files import write_tensors

SHARDS_AT_ONCE = 3  # filled or written at the same time; each is held in memory
QUEUED_BATCHES = 2  # computed and not yet copied into their shard
_POLL_S = 0.1


class ShardRecorder:
    """Records shards of a plan: threads write a shard while the next ones are computed.

    A context manager. Leaving it waits until all shards are committed; an exception abandons the
    unfinished ones.

    Args:
        source: computes the states.
        samples: of the whole plan, in stored order.
        receipts: of the published plan.

    Attributes:
        seconds_waited: time for which the target waited for the writers.
    """

    def __init__(self, source: StateSource, samples: Sequence[Sample], receipts: Receipts) -> None:
        self.source, self.samples, self.receipts = source, samples, receipts
        # Another writer of the same shard, on any machine, has another temporary file.
        self._writer, self.seconds_waited = uuid4().hex, 0.0
        self._committed = deque[int]()
        self._free = threading.Semaphore(SHARDS_AT_ONCE)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._futures: list[Future[None]] = []

    def __enter__(self) -> ShardRecorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stopped.set()
            self.receipts.files.cancel()
        with self._waiting():
            self._pool.shutdown(wait=True)
        if kind is None:
            self._raise_errors()

    def record(self, number: int) -> Iterator[int]:
        """Compute a shard and hand it to the writers; yield the number of tokens of each batch.

        Raises a `UserError` if states are not finite, or this or an earlier shard could not be
        written.
        """
        shard = self.receipts.plan.shards[number]
        samples, lengths = self.samples[shard.rows], shard.lengths
        with self._waiting():
            while not self._free.acquire(timeout=_POLL_S):
                self._raise_errors()
        batches: queue.Queue[StatesFuture] = queue.Queue(QUEUED_BATCHES)
        future = self._pool.submit(self._write, shard, samples, batches)
        future.add_done_callback(lambda _: self._free.release())
        self._futures.append(future)
        states = self.source.batches(shard, samples)
        batch_numbers = batches_of(self.receipts.plan, shard)
        for batch, computed in zip(batch_numbers, states, strict=True):
            with self._waiting():
                self._put(batches, computed)
            yield sum(lengths[i] for i in batch)

    def _put(self, batches: queue.Queue[StatesFuture], states: StatesFuture) -> None:
        while True:
            self._raise_errors()
            with suppress(queue.Full):
                return batches.put(states, timeout=_POLL_S)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds_waited += time.monotonic() - started

    def _raise_errors(self) -> None:
        """Raise the exception of a thread that failed."""
        for future in [future for future in self._futures if future.done()]:
            future.result()
            self._futures.remove(future)

    def wait(self) -> None:
        """Wait until all shards are committed; raise the exception of a thread that failed."""
        with self._waiting():
            wait(self._futures)
        self._raise_errors()

    def take_committed(self) -> list[int]:
        """Return the numbers of the shards that were committed since the last call."""
        return [self._committed.popleft() for _ in range(len(self._committed))]

    def _write(
        self, shard: Shard, samples: Sequence[Sample], batches: queue.Queue[StatesFuture]
    ) -> None:
        """Fill, write and commit one shard."""
        buffer = ShardBuffer(shard, samples, self.receipts.plan.identity)
        for batch in batches_of(self.receipts.plan, shard):
            buffer.add(batch, self._next(batches))
        self._commit(buffer)

    def _next(self, batches: queue.Queue[StatesFuture]) -> StatesFuture:
        while not self._stopped.is_set():
            try:
                return batches.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        raise InterruptedError("the recording was abandoned")

    def _commit(self, buffer: ShardBuffer) -> None:
        shard = buffer.shard
        size, digest, files = 0, "", self.receipts.files

        def save(path: Path) -> str:
            nonlocal size, digest
            digest = write_tensors(buffer.tensors, path)
            size = path.stat().st_size
            self.receipts.discard(shard)
            self.receipts.check_plan()
            return digest

        try:
            files.write(shard.file, self._writer, save)
        except OSError as error:
            raise UserError(
                f"a shard could not be written: {error}",
                where=files.where(shard.file),
                do="free disk space; the same command goes on after the last whole shard",
            ) from None
        fields = {"bytes": size, "sha256": digest, "fp8_errors": buffer.fp8_errors}
        self.receipts.commit(shard, fields, self._writer)
        self._committed.append(shard.number)


class ShardBuffer:
    """The tensors of a shard in memory, filled batch by batch (docs/formats.md lists them)."""

    def __init__(self, shard: Shard, samples: Sequence[Sample], identity: StoreIdentity) -> None:
        self.shard, self.samples, self.identity = shard, samples, identity
        self.lengths = shard.lengths
        self.offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        self.states = {  # all threads take the pages, as in `host_copy`
            name: torch.zeros(shape, dtype=dtype)
            for name, (dtype, shape) in identity.tensors(shard.records, shard.tokens).items()
            if name not in ("offsets", "tokens", "spans")  # known from the samples
        }
        self.error = self.square = torch.zeros(
            self.states["features"].shape[1], dtype=torch.float64
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the shard's file."""
        ids = np.concatenate([sample.token_ids for sample in self.samples])
        spans = np.concatenate([sample.spans for sample in self.samples])
        return {
            "offsets": self.offsets,
            "tokens": torch.from_numpy(ids.astype(np.int32)),
            "spans": torch.from_numpy(spans.astype(np.int32)),
            **self.states,
        }

    def add(self, batch: Sequence[int], future: StatesFuture) -> None:
        """Copy the states of a batch to the positions of its records; raise a `UserError` if one
        is NaN or infinite.
        """
        extracted = future()
        check_finite(extracted, [self.samples[i] for i in batch], self.identity)
        lengths = [self.lengths[i] for i in batch]
        for name, values in self.states.items():
            rows = extracted.tensors[name].split(lengths)
            for i, row in zip(batch, rows, strict=True):
                values[int(self.offsets[i]) : int(self.offsets[i + 1])] = row
        if "error" in extracted.tensors:
            self.error = self.error + extracted.tensors["error"]
            self.square = self.square + extracted.tensors["square"]

    @property
    def fp8_errors(self) -> list[tuple[float, float]]:
        """The errors of the receipt; none for other dtypes."""
        return relative_errors(self.error, self.square, self.identity.fp8_boundaries)
