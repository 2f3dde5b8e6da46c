"""Shards written by threads of their own, while the target computes the next ones."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import atomic_path, sha256_file
from draftlab.store.extraction import Pending, not_finite
from draftlab.store.fp8 import E4M3, relative_errors
from draftlab.store.manifest import Shard, StoreIdentity
from draftlab.store.receipts import Receipts
from draftlab.store.settings import NotFinite
from draftlab.store.store import DTYPES, NO_TEACHER, Sample

SHARDS_AT_ONCE = 3  # being filled or written; each is held in memory
BATCHES_AHEAD = 2  # captured, and not yet copied into their shard
_POLL_S = 0.1


class ShardWriters:
    """Writes and commits shards, at most `SHARDS_AT_ONCE` at a time.

    Leaving the block waits for all of them; leaving it by an error gives up those under way.
    """

    def __init__(self, receipts: Receipts, policy: NotFinite) -> None:
        self.receipts, self.policy = receipts, policy
        self.bytes_written, self.waited = 0, 0.0  # seconds that `shard` and its `put` blocked
        self._free = threading.Semaphore(SHARDS_AT_ONCE)
        self._stopped = threading.Event()
        self._pool = ThreadPoolExecutor(SHARDS_AT_ONCE, thread_name_prefix="shard")
        self._jobs: list[Future[int]] = []

    def __enter__(self) -> ShardWriters:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stopped.set()
        started = time.monotonic()
        self._pool.shutdown(wait=True)
        self.waited += time.monotonic() - started
        if kind is None:
            self._reap(all_of_them=True)

    @contextmanager
    def shard(
        self, shard: Shard, samples: Sequence[Sample], claim: int
    ) -> Iterator[Callable[[Pending], None]]:
        """Yields where the captured batches of a shard go, in the order of its plan.

        Args:
            claim: handle to be closed when the shard is committed or given up (`Receipts.take`).
        """
        started = time.monotonic()
        try:
            while not self._free.acquire(timeout=_POLL_S):
                self._reap()
        except BaseException:
            os.close(claim)
            raise
        self.waited += time.monotonic() - started
        batches: queue.Queue[Pending] = queue.Queue(BATCHES_AHEAD)
        job = self._pool.submit(self._write, shard, samples, batches, claim)
        job.add_done_callback(lambda _: self._free.release())
        self._jobs.append(job)

        def put(captured: Pending) -> None:
            started = time.monotonic()
            while True:
                self._reap()
                try:
                    batches.put(captured, timeout=_POLL_S)
                    break
                except queue.Full:
                    continue
            self.waited += time.monotonic() - started

        yield put

    def _reap(self, all_of_them: bool = False) -> None:
        """Raises what a thread failed with."""
        for job in [job for job in self._jobs if all_of_them or job.done()]:
            self.bytes_written += job.result()
            self._jobs.remove(job)

    def _write(
        self, shard: Shard, samples: Sequence[Sample], batches: queue.Queue[Pending], claim: int
    ) -> int:
        """Fills, writes and commits one shard; returns its bytes."""
        try:
            filling = Filling(shard, samples, self.receipts.plan.identity, self.policy)
            for batch in shard.batches:
                filling.take(batch, self._next(batches))
            path = self.receipts.folder / shard.file
            return self._commit(path, shard, filling)
        finally:
            os.close(claim)

    def _next(self, batches: queue.Queue[Pending]) -> Pending:
        while not self._stopped.is_set():
            try:
                return batches.get(timeout=_POLL_S)
            except queue.Empty:
                continue
        raise InterruptedError("the recording was given up")

    def _commit(self, path: Path, shard: Shard, filling: Filling) -> int:
        scratch = self.receipts.scratch(shard)
        try:
            scratch.mkdir()
            with atomic_path(path) as temporary:
                save_file(filling.tensors, scratch / shard.file)
                os.replace(scratch / shard.file, temporary)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"a shard could not be written: {error}",
                where=path,
                do="free disk space; the same command goes on after the last whole shard",
            ) from None
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        size = path.stat().st_size
        known = {"bytes": size, "sha256": sha256_file(path), **filling.findings()}
        self.receipts.write(shard, known)
        return size


class Filling:
    """A shard's tensors, as its batches come in."""

    def __init__(
        self, shard: Shard, samples: Sequence[Sample], identity: StoreIdentity, policy: NotFinite
    ) -> None:
        self.shard, self.samples, self.identity, self.policy = shard, samples, identity, policy
        self.offsets = torch.tensor([0, *shard.lengths]).cumsum(0)
        shapes, kinds = identity.shapes(shard), DTYPES[identity.dtype]
        self.states = {
            "features": torch.empty(shapes["features"], dtype=kinds.features),
            "last": torch.empty(shapes["last"], dtype=kinds.last),
            "logsumexp": torch.empty(shapes["logsumexp"], dtype=torch.float32),
            "argmax": torch.empty(shapes["argmax"], dtype=torch.int32),
        }
        if kinds.features is E4M3:
            self.states["scales"] = torch.empty(shapes["scales"], dtype=torch.float32)
        self.spans = torch.tensor([i for s in samples for i in s.spans], dtype=torch.int32)
        self.error = self.square = torch.zeros(shapes["features"][1], dtype=torch.float64)
        self.not_finite: dict[str, str] = {}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of the shard's."""
        ids = [i for s in self.samples for i in s.token_ids]
        return {
            "offsets": self.offsets,
            "tokens": torch.tensor(ids, dtype=torch.int32),
            "spans": self.spans,
            **self.states,
        }

    def take(self, batch: Sequence[int], pending: Pending) -> None:
        """Puts the records of a batch where they belong.

        Raises:
            UserError: a state is NaN or infinite, and the recipe does not skip such samples.
        """
        captured = pending()
        bad = not_finite(captured, [self.samples[i] for i in batch], self.identity)
        for number, place in bad.items():
            self._skip(self.samples[batch[number]], place)
        lengths = [self.shard.lengths[i] for i in batch]
        for name, whole in self.states.items():
            pieces = captured.tensors[name].split(lengths)
            for number, (i, piece) in enumerate(zip(batch, pieces, strict=True)):
                window = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
                whole[window] = piece
                if number in bad:
                    blank = {"logsumexp": NO_TEACHER[0], "argmax": NO_TEACHER[1]}
                    whole[window] = torch.tensor(blank.get(name, 0)).to(whole.dtype)
                    self.spans[window] = 0
        if "error" in captured.tensors:
            self.error = self.error + captured.tensors["error"]
            self.square = self.square + captured.tensors["square"]

    def _skip(self, sample: Sample, place: str) -> None:
        if self.policy == "refuse":
            raise UserError(
                f"expected finite states, found NaN or infinity at {place}",
                where=f"sample {sample.id!r}",
                do="load the target in float32 or bfloat16 (target.dtype; float16 overflows "
                "easily), or leave such samples out (record.not_finite: skip)",
            )
        self.not_finite[sample.id] = place

    def findings(self) -> dict[str, object]:
        """What the receipt says of the content."""
        found: dict[str, object] = {"not_finite": self.not_finite}
        if "scales" in self.states:
            boundaries = len(self.identity.boundaries)
            found["fp8_errors"] = relative_errors(self.error, self.square, boundaries)
        return found
