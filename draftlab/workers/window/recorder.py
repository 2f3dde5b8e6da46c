"""Records the shards of a window while a training reads them (`record.window`).

A thread of rank 0 leads a pool of workers. It follows the groups of shards that the training needs,
in their order: it hands shards out as long as the window has room, compares each with its receipt,
and deletes those that all ranks have read. Other ranks see what is there in a file, `WindowState`.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.store.receipts import Receipts, renew_version
from draftlab.store.store import Store
from draftlab.train.batch.window_order import WindowOrder
from draftlab.train.settings import TrainSettings
from draftlab.workers.pool import WorkerPool
from draftlab.workers.window.session import WindowProgress, WindowSession
from draftlab.workers.window.shards import Demand, WindowShards
from draftlab.workers.window.state import WindowState

VERIFIERS = 2
"""Threads that compare shards with their receipts."""


class WindowRecorder:
    """Makes the shards of a training; a `WindowFeed`, and a context manager that ends the workers.

    Args:
        store: that is trained on.
        settings, seed: of the training.
        new_pool: returns the workers.
        state: for the other ranks; None: there are none.
        monitor: receives lines, and progress until training begins.
    """

    def __init__(
        self,
        store: Store,
        settings: TrainSettings,
        seed: int,
        new_pool: Callable[[], WorkerPool],
        state: WindowState | None,
        monitor: Monitor,
    ) -> None:
        self.store, self.settings, self.monitor = store, settings, monitor
        self.order, self.new_pool, self.state = WindowOrder(store.manifest, seed), new_pool, state
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        self._progress, self._started, self._ended = WindowProgress(0, 0, 0), 0.0, False
        self.shards: WindowShards | None = None

    def __enter__(self) -> WindowRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the training calls, in any thread.

    def begin(self, finished_groups: int) -> None:
        self._progress = WindowProgress(finished_groups, finished_groups, finished_groups)
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._lead, name="window", daemon=True)
        self._thread.start()

    def wait(self, group: int) -> bool:
        waited = False
        with self._changed:
            while self._progress.ready <= group:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    raise InterruptedError("the training has ended")
                waited = True
                self._changed.wait(1.0)
        return waited

    def report_finished_groups(self, count: int) -> None:
        self._progress.finished_groups = max(self._progress.finished_groups, count)

    def share_waited(self) -> float | None:
        elapsed = time.monotonic() - self._started
        return self._progress.idle_s / elapsed if self._thread is not None and elapsed else None

    def stop(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and the workers."""
        self.stop()
        self._progress.stopped.set()
        if self._thread is not None:
            self._thread.join()

    def clear(self) -> None:
        """Delete the shards that come and go, behind `close`: the training has ended."""
        receipts = Receipts.from_published(self.store.folder)
        (self.shards or self._new_shards(receipts)).clear()

    def line(self) -> str:
        """Return a line about what was recorded."""
        shards, share = self.shards, self.share_waited()
        if shards is None or share is None:
            return "window: nothing was recorded"
        return (
            f"window: recorded {shards.tokens:,} tokens in {count_text(shards.recorded, 'shard')}, "
            f"{shards.again:,} of them again; the recording waited for room {share:.0%} of the time"
        )

    # The thread.

    def _lead(self) -> None:
        try:
            # Workers of a killed recorder that still write end with an error.
            renew_version(self.store.folder)
            receipts = Receipts.from_published(self.store.folder)
            self.shards = self._new_shards(receipts)
            with (
                ThreadPoolExecutor(VERIFIERS, "verify") as verifiers,
                self.new_pool() as pool,
            ):
                WindowSession(
                    self._progress,
                    self.shards,
                    self._new_demand(),
                    pool,
                    verifiers,
                    self._announce,
                    lambda done, total: self.monitor.progress("record", done, total),
                ).run()
        except Exception as error:
            if not isinstance(error, UserError):
                traceback.print_exc()
                error = UserError(
                    f"the recording of the window failed: {type(error).__name__}: {error}",
                    where=self.store.folder,
                    do="this is a bug or a fault of the machine; the same command goes on after "
                    "the last checkpoint",
                )
            self._error = error
            self._announce()

    def _new_shards(self, receipts: Receipts) -> WindowShards:
        first = self.order.first
        sizes = {first + i: int(size) for i, size in enumerate(self.order.sizes)}
        return WindowShards(receipts, sizes, self.order.window, self.monitor)

    def _announce(self) -> None:
        """Let all ranks know which groups are there, or the error."""
        with self._changed:
            self._changed.notify_all()
        if self.state is not None:
            self.state.write(self._progress.ready, self._error)

    def _new_demand(self) -> Demand:
        """Return the groups that the training needs from its first step here on."""
        rows = self.settings.steps * self.settings.batch_rows
        groups = self.order.needed(rows, self.settings.row_tokens)
        first = self.order.first
        numbers = ([first + i for i in group] for group in groups)
        return Demand(numbers, self._progress.first)
