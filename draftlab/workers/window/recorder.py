"""Records the shards of a window while a training reads them (`record.window`).

A thread of rank 0 leads a pool of workers. It follows the groups of shards that the training needs,
in their order: it hands shards out as long as the window has room, compares each with its receipt,
and deletes those that all ranks have read. It tells the other ranks what is there.
"""

from __future__ import annotations

import json
import os
import threading
import time
import traceback
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import timedelta

import torch.distributed as dist

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST
from draftlab.store.resume import Receipts
from draftlab.store.shard import WrittenShard
from draftlab.store.store import Store
from draftlab.train.batch.window_order import WindowOrder
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.settings import TrainSettings
from draftlab.workers.pool import MAX_ATTEMPTS, Tasks, Worker, WorkerPool
from draftlab.workers.window.shards import DamagedShardError, WindowShards

VERIFIERS = 2
"""Threads that compare shards with their receipts."""
GROUPS_AHEAD = 4
"""Groups that are made at the same time, the one that is read included."""
FOLLOWERS = "window followers"
"""Key of the number of other ranks that have not heard of an error."""
HEARD_S = 10.0
"""Most time for which rank 0 stays after an error, in seconds: its store ends with its process."""
STATE = "window"
"""Key of what rank 0 tells: how many groups of shards are or were there, and the error or null."""
SILENCE_S = 180.0
"""Time without an answer of rank 0 after which the other ranks end."""
POLL_S, FOLLOWER_POLL_S = 0.05, 0.2
_PARTS = ("what", "where", "do")


class WindowRecorder:
    """Makes the shards of a training; a `WindowFeed`, and a context manager that ends the workers.

    Args:
        settings, seed: of the training.
        shared: for the other ranks, of `shared_store`; None: there are none.
        monitor: receives lines, and progress until training begins.
    """

    def __init__(
        self,
        store: Store,
        settings: TrainSettings,
        seed: int,
        new_pool: Callable[[], WorkerPool],
        shared: dist.Store | None,
        monitor: Monitor,
    ) -> None:
        self.store, self.monitor, self.new_pool, self.shared = store, monitor, new_pool, shared
        self.order = WindowOrder(store.manifest, seed)
        rows = settings.steps * settings.batch_rows
        self._groups = [
            [self.order.first + i for i in group]
            for group in self.order.needed(rows, settings.row_tokens)
        ]
        self._changed, self._ended = threading.Condition(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: UserError | None = None
        self._announced: object = None
        self._started = self._idle_s = 0.0
        self._ready = self._finished_groups = 0  # numbers of first groups
        self.shards: WindowShards | None = None

    def __enter__(self) -> WindowRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._thread is not None:
            self._thread.join()

    # What the training calls, in any thread.

    def begin(self, finished_groups: int) -> None:
        self._ready = self._finished_groups = finished_groups
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._lead, name="window", daemon=True)
        self._thread.start()

    def wait(self, group: int) -> bool:
        waited = False
        with self._changed:
            while self._ready <= group:
                if self._error is not None:
                    raise self._error
                if self._ended.is_set():
                    raise InterruptedError("the training has ended")
                waited = True
                self._changed.wait(1.0)
        return waited

    def report_finished_groups(self, count: int) -> None:
        self._finished_groups = max(self._finished_groups, count)

    def share_waited(self) -> float | None:
        elapsed = time.monotonic() - self._started
        return self._idle_s / elapsed if self._thread is not None and elapsed else None

    def stop(self) -> None:
        with self._changed:
            self._ended.set()
            self._changed.notify_all()

    def clear(self) -> None:
        """Delete the shards that come and go, when the block has ended with the training."""
        # A worker on another machine that ends later than it was told to writes no more.
        os.utime(self.store.folder / MANIFEST)
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
            # Workers of a killed recorder that still write end with an error (`check_plan`).
            os.utime(self.store.folder / MANIFEST)
            self.shards = self._new_shards(Receipts.from_published(self.store.folder))
            with ThreadPoolExecutor(VERIFIERS, "verify") as verifiers, self.new_pool() as pool:
                session = WindowSession(
                    self.shards, self._groups, self._finished_groups, pool, verifiers, self.monitor
                )
                try:
                    while not self._ended.is_set():
                        self._idle_s += session.step(self._finished_groups)
                        self._ready = session.ready
                        self._announce()
                finally:
                    session.cancel()
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
            if self.shared is not None:
                wait_until_heard(self.shared)

    def _new_shards(self, receipts: Receipts) -> WindowShards:
        sizes = {self.order.first + i: int(size) for i, size in enumerate(self.order.sizes)}
        return WindowShards(receipts, sizes, self.order.window, self.monitor)

    def _announce(self) -> None:
        """Let all ranks know which groups are there, or the error."""
        with self._changed:
            self._changed.notify_all()
        error = self._error and {name: str(getattr(self._error, name)) for name in _PARTS}
        if self.shared is not None and (news := (self._ready, error)) != self._announced:
            self._announced = news
            self.shared.set(STATE, json.dumps(news))


class WindowSession:
    """Makes the shards of the groups that a training needs, in their order.

    Args:
        shards: on the disk.
        groups: numbers of shards, of all groups of the training.
        first: the group that the training begins with.
        pool: the workers.
        verifiers: threads that compare shards with their receipts.
        monitor: receives lines, and the progress of the first group.

    Attributes:
        ready: number of the first groups whose shards are or were there.
        reading: groups that the training reads or will read, as far as they are being made.
        blocked: shards of the last one that wait for room.
        tasks: shards to be computed.
        written: shards that a worker has computed and not yet reported as committed.
        verifying: shards that are compared with their receipts, and whether they are new.
    """

    def __init__(
        self,
        shards: WindowShards,
        groups: list[list[int]],
        first: int,
        pool: WorkerPool,
        verifiers: ThreadPoolExecutor,
        monitor: Monitor,
    ) -> None:
        self.shards, self.groups, self.first, self.monitor = shards, groups, first, monitor
        self.pool, self.verifiers = pool, verifiers
        self.ready = self._next = first
        self.reading, self.blocked = deque[int](), deque[int]()
        self.tasks = Tasks(pool, "record_ahead", range(len(shards.plan.shards)))
        self.written: dict[int, Worker] = {}
        self.verifying: dict[Future[WrittenShard], tuple[int, bool]] = {}
        self._uses = defaultdict[int, list[int]](list)
        for number, group in enumerate(groups):
            for shard in group:
                self._uses[shard].append(number)

    def step(self, finished_groups: int) -> float:
        """Make shards for a moment; return the seconds in which there was no room for any.

        No rank reads the first `finished_groups` again.
        """
        started, idle = time.monotonic(), 0.0
        while self.reading and self.reading[0] < finished_groups:
            self.shards.needed.subtract(self.groups[self.reading.popleft()])
        self._admit()
        self.tasks.hand_out()
        busy = {id(worker) for worker, _ in self.tasks.running.values()}
        for worker in set(self.written.values()):
            if id(worker) not in busy:  # it reports what it has computed
                self.tasks.running[worker.call("record_ahead", None)] = worker, None
        if futures := [*self.tasks.running, *self.verifying]:
            wait(futures, POLL_S, FIRST_COMPLETED)
            verified = [future for future in self.verifying if future.done()]
            for worker, number, committed in self.tasks.collect():
                if number is not None:
                    self.written[number] = worker
                for shard in committed:
                    if self.written.pop(shard, None) is not None:
                        self._verify(shard, new=True)
            for future in verified:
                self._collect_verified(future)
        else:
            time.sleep(POLL_S)
            idle = time.monotonic() - started if self.blocked else 0.0
        lost = [n for n, worker in self.written.items() if worker not in self.pool.workers]
        for number in lost:
            del self.written[number]
            self.tasks.waiting.appendleft(number)
        self._count_ready()
        return idle

    def cancel(self) -> None:
        """Leave what has not begun: the training would wait until queued shards are hashed."""
        for future in self.verifying:
            future.cancel()

    def _next_use(self, shard: int) -> float:
        """Return the number of the next group to be made that has a shard; infinity: none has."""
        uses = self._uses[shard]
        place = bisect_left(uses, self._next)
        return uses[place] if place < len(uses) else float("inf")

    def _admit(self) -> None:
        """Begin with the next shards, as long as there is room."""
        while True:
            while self.blocked:
                if not self.shards.make_room(self.blocked[0], self._next_use):
                    return
                self.tasks.waiting.append(self.blocked.popleft())
            if len(self.reading) == GROUPS_AHEAD or self._next == len(self.groups):
                return
            self.reading.append(self._next)
            for shard in self.groups[self._next]:
                self.shards.needed[shard] += 1
                if shard not in self.shards.on_disk:
                    self.blocked.append(shard)
                elif self.shards.needed[shard] == 1 and shard not in self.shards.verified:
                    self._verify(shard, new=False)  # an earlier recorder left it
            self._next += 1

    def _verify(self, number: int, *, new: bool) -> None:
        self.verifying[self.verifiers.submit(self.shards.read, number)] = number, new

    def _collect_verified(self, future: Future[WrittenShard]) -> None:
        number, new = self.verifying.pop(future)
        file, attempts = self.shards.plan.shards[number].file, self.tasks.attempts
        try:
            self.shards.add_verified(number, future.result(), new=new)
            del attempts[number]  # a long training may lose it again in a later epoch
        except DamagedShardError as error:
            attempts[number] += 1
            if attempts[number] == MAX_ATTEMPTS:
                raise UserError(
                    f"the shard is damaged {MAX_ATTEMPTS} times in a row: {error}",
                    where=self.shards.folder / file,
                    do="check the disk; the same command goes on after the last checkpoint",
                ) from None
            self.monitor.say(f"{file}: {error}; it is recorded again")
            self.shards.delete_files(number)
            self.tasks.waiting.appendleft(number)  # its room stays reserved: a group waits for it

    def _count_ready(self) -> None:
        """Count the groups that are there, and show how far the first one is."""
        for number in self.reading:
            if number < self.ready:
                continue
            missing = [n for n in self.groups[number] if n not in self.shards.verified]
            if number == self.first:
                tokens, left = (
                    sum(self.shards.plan.shards[n].tokens for n in one)
                    for one in (self.groups[number], missing)
                )
                self.monitor.progress("record", tokens - left, tokens)
            if missing:
                return
            self.ready = number + 1


def wait_until_heard(shared: dist.Store) -> None:
    """Wait until all other ranks have read the error, at most `HEARD_S`."""
    end = time.monotonic() + HEARD_S
    while shared.add(FOLLOWERS, 0) > 0 and time.monotonic() < end:
        time.sleep(FOLLOWER_POLL_S)


def shared_store(ranks: Ranks) -> dist.Store:
    """Return a store of keys that rank 0 serves, and all ranks read."""
    host, silence, server = os.environ["MASTER_ADDR"], timedelta(seconds=SILENCE_S), None
    if ranks.is_main:
        server = dist.TCPStore(host, 0, is_master=True, timeout=silence, wait_for_workers=False)
    port = ranks.broadcast(server and server.port)
    return server or dist.TCPStore(host, port, timeout=silence)


class WindowFollower:
    """A `WindowFeed` of the ranks whose window rank 0 has filled, which tells them by
    `shared_store`.
    """

    def __init__(self, shared: dist.Store) -> None:
        self._shared, self._ready, self._ended = shared, 0, False
        shared.add(FOLLOWERS, 1)

    def __enter__(self) -> WindowFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, finished_groups: int) -> None:
        pass

    def wait(self, group: int) -> bool:
        waited = False
        while self._ready <= group:
            if self._ended:
                raise InterruptedError("the training has ended")
            self._read()
            if self._ready <= group:
                waited = True
                time.sleep(FOLLOWER_POLL_S)
        return waited

    def report_finished_groups(self, count: int) -> None:
        pass

    def share_waited(self) -> float | None:
        return None

    def stop(self) -> None:
        self._ended = True

    def _read(self) -> None:
        try:
            self._ready, error = json.loads(self._shared.get(STATE))
        except dist.DistError as lost:
            raise UserError(
                "expected rank 0 to record the window, heard nothing of it: "
                + str(lost).partition("\n")[0],
                do="look at its log; the same command goes on after the last checkpoint",
            ) from None
        if error:
            self._shared.add(FOLLOWERS, -1)
            raise UserError(error["what"], where=error["where"], do=error["do"])
