"""Verification of a store's shards by their hashes, in threads beside the training."""

from __future__ import annotations

import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.columns import map_columns, write_columns
from draftlab.store.shard import NO_FILE, NO_TIME, Shard
from draftlab.store.store import Store
from draftlab.train.checkpoint import set_unverified_aside
from draftlab.train.distributed.ranks import Ranks

VERIFIED = "verified.safetensors"
_COLUMNS = {"store_sha256": np.uint8, "modified_ns": np.int64}
_POLL_S = 0.5
_THREADS = 8
"""Threads that hash when no training runs beside them."""


class ShardVerification:
    """Hashes the shards of a store while a training reads them.

    A shard is left out if the training's folder says that it had the right hash and its file has
    not changed since. Rank 0 decides which shards are left, and the ranks share them.

    Args:
        store: of one at a URL each shard is hashed when it is downloaded, before anything reads it.
        folder: of the training. Rank 0 writes VERIFIED into it at each `update`: the digest of the
            store, and for each shard that had the right hash the time of its file's last change.

    Attributes:
        pending: int64, numbers of the shards that had to be hashed, equal on every rank.
        complete: whether all shards have the hashes of the manifest, equal on every rank.
    """

    def __init__(self, store: Store, folder: Path, ranks: Ranks) -> None:
        self.store, self.folder, self.ranks = store, folder, ranks
        hashed_here = store.files.is_local
        # The recorder of a window verifies the shards that are not kept.
        self._num_shards = store.manifest.num_kept if hashed_here else 0
        self._verified = self._remembered() if ranks.is_main else np.zeros(0, np.int64)
        self.pending = ranks.broadcast(self._changed() if ranks.is_main else self._verified)
        self.complete, self._stopped = not len(self.pending), threading.Event()
        self._left = deque(self.pending[ranks.rank :: ranks.size].tolist())
        self._hashed: list[tuple[int, int]] = []  # numbers of shards, and times of their files
        self._num_exchanged = self._num_hashed = 0
        self._pool = ThreadPoolExecutor(_THREADS, "verify")
        self._futures = [self._pool.submit(self._verify)]

    def _remembered(self) -> np.ndarray:
        """Return the times of VERIFIED: int64 [shards]; `NO_TIME`: the shard is not hashed."""
        path, times = self.folder / VERIFIED, np.full(self._num_shards, NO_TIME)
        if not self._num_shards or not path.is_file():
            return times
        try:
            columns = map_columns(path, _COLUMNS)
        except ValueError:  # a damaged file: all shards are hashed again
            return times
        is_same = columns["store_sha256"].tobytes().hex() == self.store.digest
        if is_same and columns["modified_ns"].shape == times.shape:
            times[:] = columns["modified_ns"]
        return times

    def _changed(self) -> np.ndarray:
        """Return the numbers of the shards whose files are not known to be right."""
        if not self._num_shards:
            return np.zeros(0, np.int64)
        listing, numbers = self.store.files.list(), range(self._num_shards)
        times = np.array([listing.get(number, NO_FILE)[1] for number in numbers], np.int64)
        return np.flatnonzero((times != self._verified) | (times == NO_TIME))

    def _modified_ns(self, shard: Shard) -> int:
        try:
            with self.store.files.local_file(shard) as path:
                return os.stat(path).st_mtime_ns
        except OSError:
            return NO_TIME  # `Store.verify` names the file

    def _verify(self) -> UserError | None:
        """Hash the shards that no thread has taken; return the error that names a damaged one."""
        while self._left and not self._stopped.is_set():
            try:
                number = self._left.popleft()
            except IndexError:  # another thread was faster
                break
            try:
                modified_ns = self._modified_ns(self.store.manifest.shards[number])
                self.store.verify([number])
            except UserError as error:
                return error
            self._hashed.append((number, modified_ns))
        return None

    def _write(self, hashed: np.ndarray) -> None:
        """Write VERIFIED on rank 0, with the shards that were hashed since: int64 [n, 2]."""
        if self.ranks.is_main:
            self._verified[hashed[:, 0]] = hashed[:, 1]
            digest = np.frombuffer(bytes.fromhex(self.store.digest), np.uint8)
            columns = {"store_sha256": digest, "modified_ns": self._verified}
            write_columns(columns, self.folder / VERIFIED)

    def _new_hashed(self) -> np.ndarray:
        """Return what was hashed since the last call: int64 [n, 2]."""
        new = np.array(self._hashed[self._num_exchanged :], np.int64).reshape(-1, 2)
        self._num_exchanged += len(new)
        return new

    def update(self) -> int:
        """Exchange with all ranks what is hashed, without waiting for the rest, and remember it;
        return how many of the pending shards have the right hash.

        If a shard has another one than in the manifest, every process raises a `UserError`, and the
        checkpoints that were trained with it are set aside.
        """
        if self.complete:
            return len(self.pending)
        done = [future.result() for future in self._futures if future.done()]
        error = next(filter(None, done), None)
        new = self._new_hashed()
        errors, hashed = zip(*self.ranks.all_gather((error, new)), strict=True)
        self._num_hashed += sum(map(len, hashed))
        self._write(np.concatenate(hashed))
        for error in filter(None, errors):
            raise self._with_checkpoints(error)
        self.complete = self._num_hashed == len(self.pending)
        return self._num_hashed

    def _with_checkpoints(self, error: UserError) -> UserError:
        """Return the error about a damaged shard, with the checkpoints that are not to be used."""
        aside = set_unverified_aside(self.folder / "checkpoints") if self.ranks.is_main else []
        if not (aside := self.ranks.broadcast(aside)):
            return error
        paths = ", ".join(map(str, aside))
        return UserError(
            f"{error.what}; these checkpoints were trained with it and must be removed: {paths}",
            where=error.where,
            do=f"{error.do}; remove these checkpoints, and the same command resumes from an older "
            "one or from the start",
        )

    def finish(self, monitor: Monitor) -> bool:
        """Wait until all ranks have hashed their shards (see `update`), with the threads that a
        training needs no more; return whether any were left.
        """
        were_left = not self.complete
        if were_left:
            self._futures += [self._pool.submit(self._verify) for _ in range(1, _THREADS)]
        while not self.complete:
            monitor.progress("verify", self.update(), len(self.pending))
            wait(self._futures, 0 if self.complete else _POLL_S)
        return were_left

    def close(self) -> None:
        """End the threads after their present shards, and write what they have hashed."""
        self._stopped.set()
        self._pool.shutdown()
        if not self.complete:
            self._write(self._new_hashed())
