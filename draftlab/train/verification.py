"""Verification of a store's shards by their hashes, in a thread beside the training."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import read_json, write_json
from draftlab.progress import Monitor
from draftlab.store.manifest import Shard
from draftlab.store.store import Store
from draftlab.train.checkpoint import set_unverified_aside
from draftlab.train.distributed.ranks import Ranks

VERIFIED = "verified.json"
_POLL_S = 0.5
_WRITE_S = 5.0


class ShardVerification:
    """Hashes the shards of a store while a training reads them.

    A shard is left out if the training's folder says that it had the right hash and its file has
    not changed since. Rank 0 decides which shards are left, and the ranks share them.

    Args:
        store: a store. One that is not on disk has nothing to hash, and of one at a URL each shard
            is hashed when it is downloaded, before anything reads it.
        folder: of the training. VERIFIED in it holds for each shard its hash and the size and the
            time of the last change (ns) of its file. Rank 0 writes it every few seconds.
        ranks: the processes that train together.

    Attributes:
        pending: numbers of the shards that had to be hashed, equal on every rank.
        complete: whether all shards have the hashes of the manifest, equal on every rank.
    """

    def __init__(self, store: Store, folder: Path, ranks: Ranks) -> None:
        self.store, self.folder, self.ranks = store, folder, ranks
        hashed_here = store.on_disk and store.files.is_local
        shards = store.manifest.shards if hashed_here else []
        if store.window is not None and store.window.rolls:
            shards = shards[: store.window.validation_shards]  # the recorder verifies the others
        self._verified: dict[str, Any] = {}
        if ranks.is_main and shards and (folder / VERIFIED).is_file():
            self._verified = read_json(folder / VERIFIED)
        changed = (
            [n for n, shard in enumerate(shards) if self._is_new(shard)] if ranks.is_main else []
        )
        self.pending = ranks.broadcast(changed)
        self.complete, self._stopped = not self.pending, threading.Event()
        self._hashed: dict[str, Any] = {}
        self._write_lock, self._last_write = threading.Lock(), time.monotonic()
        self._pool = ThreadPoolExecutor(1, "verify")
        self._future = self._pool.submit(self._verify, self.pending[ranks.rank :: ranks.size])

    def _is_new(self, shard: Shard) -> bool:
        remembered = self._verified.get(shard.file)
        # Older versions also wrote the file's inode, which differs between machines.
        return remembered is None or remembered[:3] != self._state(shard)

    def _state(self, shard: Shard) -> list[Any] | None:
        try:
            with self.store.files.local_file(shard) as path:
                stat = os.stat(path)
        except OSError:
            return None  # `Store.verify` names the file
        return [shard.sha256, stat.st_size, stat.st_mtime_ns]

    def _verify(self, numbers: list[int]) -> UserError | None:
        """Return the error that names the first damaged shard."""
        for number in numbers:
            if self._stopped.is_set():
                break
            shard = self.store.manifest.shards[number]
            try:
                state = self._state(shard)
                self.store.verify([number])
            except UserError as error:
                return error
            self._hashed[shard.file] = state
            if time.monotonic() - self._last_write > _WRITE_S:
                self._write()
        return None

    def _write(self) -> None:
        """Write VERIFIED on rank 0, with the shards of the other ranks up to the last `update`."""
        if self.ranks.is_main:
            with self._write_lock:
                write_json(self.folder / VERIFIED, self._verified | self._hashed)
                self._last_write = time.monotonic()

    def update(self) -> int:
        """Exchange with all ranks what is hashed, without waiting for the rest, and remember it.

        Returns:
            How many of the pending shards have the right hash.

        Raises:
            UserError: a shard has another hash than in the manifest; in every process. The
                checkpoints that were trained with it are set aside.
        """
        if self.complete:
            return len(self.pending)
        error = self._future.result() if self._future.done() else None
        results = self.ranks.all_gather((error, dict(self._hashed)))
        for _, hashed in results:
            self._verified.update(hashed)
        self._write()
        for error in filter(None, (error for error, _ in results)):
            raise self._with_checkpoints(error)
        count = sum(len(hashed) for _, hashed in results)
        self.complete = count == len(self.pending)
        return count

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
        """Wait until all ranks have hashed their shards; return whether any were left.

        Raises:
            UserError: as in `update`.
        """
        were_left = not self.complete
        while not self.complete:
            monitor.progress("verify", self.update(), len(self.pending))
            wait([self._future], 0 if self.complete else _POLL_S)
        return were_left

    def close(self) -> None:
        """End the thread after its present shard, and write what it has hashed."""
        self._stopped.set()
        self._pool.shutdown()
        if not self.complete:
            self._write()
