"""Verification of a store's shards by their hashes, in a thread beside the training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import read_json, write_json
from draftlab.progress import Monitor
from draftlab.store.manifest import Shard
from draftlab.store.store import Store

VERIFIED = "verified.json"
_POLL_S = 0.5


class ShardVerification:
    """Hashes the shards of a store while a training reads them; `finish` raises what is wrong.

    A shard is left out if the training's folder says that it had the right hash and its file has
    not changed since. The processes that train together share the work.

    Args:
        store: a store; one that is not on disk has nothing to hash.
        folder: of the training. VERIFIED in it holds for each shard its hash and the size, the
            time of the last change (ns) and the inode of its file.
        rank, size: number of this process, and of all processes.
    """

    def __init__(self, store: Store, folder: Path, rank: int = 0, size: int = 1) -> None:
        self.store, self.path = store, folder / VERIFIED
        shards = store.manifest.shards if store.on_disk else []
        self.verified = read_json(self.path) if shards and self.path.is_file() else {}
        changed = [number for number, shard in enumerate(shards) if self._is_new(shard)]
        self.finished, self._stopped = not changed, threading.Event()
        self.pending = changed[rank::size]
        self._pool = ThreadPoolExecutor(1, "verify")
        self._future = self._pool.submit(self._verify, self.pending)

    def _is_new(self, shard: Shard) -> bool:
        return self.verified.get(shard.file) != self._state(shard)

    def _state(self, shard: Shard) -> list[Any]:
        try:
            stat = os.stat(shard.path(self.store.folder))
        except OSError:
            return []  # `Store.verify` names the file
        return [shard.sha256, stat.st_size, stat.st_mtime_ns, stat.st_ino]

    def _verify(self, pending: list[int]) -> UserError | None:
        """Return the error that names the first damaged shard."""
        for number in pending:
            if self._stopped.is_set():
                break
            shard = self.store.manifest.shards[number]
            try:
                state = self._state(shard)
                self.store.verify([number])
            except UserError as error:
                return error
            self.verified[shard.file] = state
        return None

    def finish(self, all_gather: Callable[[Any], list[Any]], monitor: Monitor) -> None:
        """Wait until all processes have hashed their shards. What was verified is remembered.

        Args:
            all_gather: returns the values of all processes.

        Raises:
            UserError: a shard has another hash than in the manifest; in every process.
        """
        if self.finished:
            return
        while wait([self._future], _POLL_S).not_done:
            done = sum(not self._is_new(self.store.manifest.shards[i]) for i in self.pending)
            monitor.progress("verify", done, len(self.pending))
        results = all_gather((self._future.result(), self.verified))
        for error in filter(None, (error for error, _ in results)):
            raise error
        self.verified = {file: state for _, verified in results for file, state in verified.items()}
        write_json(self.path, self.verified)
        self.finished = True

    def close(self) -> None:
        """End the thread after its present shard."""
        self._stopped.set()
        self._pool.shutdown()
