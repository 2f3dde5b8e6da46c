"""The thread that makes the shards of a window: it hands them to workers, and deletes read ones."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from draftlab.errors import UserError
from draftlab.store.shard import WrittenShard
from draftlab.workers.pool import MAX_ATTEMPTS, Outcome, Worker, WorkerPool, done_futures
from draftlab.workers.window.shards import DamagedShardError, Demand, WindowShards, shard_number

POLL_S = 0.05
GROUPS_AHEAD = 4
"""Groups that are made at the same time, the one that is read included."""
_FLUSH = -1
"""In place of a shard's number: the worker writes what it has computed."""


@dataclass
class WindowProgress:
    """Messages between the training and the thread that records its shards.

    Groups are counted from the first epoch's first one on.

    Attributes:
        first: the group that the training begins with.
        finished_groups: number of the first groups that no rank reads again.
        ready: number of the first groups whose shards are or were there.
        idle_s: seconds in which the thread waited for room.
        stopped: set when nothing more is to be made.
    """

    first: int
    finished_groups: int
    ready: int
    idle_s: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Group:
    """A group of shards that the training reads or will read."""

    number: int
    shards: list[int]


class WindowSession:
    """Makes the shards of the groups that a training needs, in their order.

    Args:
        progress: shared with the training.
        shards: on the disk.
        demand: the groups, from the one on that the training begins with.
        pool: the workers.
        verifiers: threads that compare shards with their receipts.
        announce: is called now and then, and whenever groups have become ready.
        show: receives the tokens of the first group that are there, and all its tokens.

    Attributes:
        groups: that the training reads or will read, as far as they are being made.
        blocked: shards of the last one that wait for room.
        waiting, running: shards to be computed, and the calls of workers.
        written: shards that a worker has computed and not yet reported as committed.
        verifying: shards that are compared with their receipts, and whether they are new.
    """

    def __init__(
        self,
        progress: WindowProgress,
        shards: WindowShards,
        demand: Demand,
        pool: WorkerPool,
        verifiers: ThreadPoolExecutor,
        announce: Callable[[], None],
        show: Callable[[int, int], None],
    ) -> None:
        self.progress, self.shards, self.demand = progress, shards, demand
        self.pool, self.verifiers, self.announce, self.show = pool, verifiers, announce, show
        self.groups: deque[_Group] = deque()
        self.blocked: deque[int] = deque()
        self.waiting: deque[int] = deque()
        self.running: dict[Future[Outcome], tuple[Worker, int]] = {}
        self.written: dict[int, Worker] = {}
        self.verifying: dict[Future[WrittenShard], tuple[int, bool]] = {}
        self.attempts: Counter[int] = Counter()

    def run(self) -> None:
        """Make shards until the training has ended."""
        try:
            while not self.progress.stopped.is_set():
                self._make_shards()
        finally:  # else the training would wait until queued shards are hashed
            for future in self.verifying:
                future.cancel()

    def _make_shards(self) -> None:
        started = time.monotonic()
        self._release()
        self._admit()
        if self.waiting:
            self.pool.start_workers(len(self.waiting) + len(self.running))
        tasks = range(len(self.shards.plan.shards))
        self.pool.hand_out("record_ahead", tasks, self.waiting, self.running)
        self._flush()
        if futures := [*self.running, *self.verifying]:
            wait(futures, POLL_S, FIRST_COMPLETED)
            verified = done_futures(self.verifying)
            # In the order of the calls: a later one reports what an earlier one computed.
            for future in done_futures(self.running):
                self._collect(future)
            for future in verified:
                self._collect_verified(future)
        else:
            time.sleep(POLL_S)
            if self.blocked:
                self.progress.idle_s += time.monotonic() - started
        self._announce()

    def _release(self) -> None:
        while self.groups and self.groups[0].number < self.progress.finished_groups:
            for shard in self.groups.popleft().shards:
                self.shards.needed[shard] -= 1

    def _admit(self) -> None:
        """Begin with the next shards, as long as there is room."""
        while True:
            while self.blocked:
                if not self.shards.make_room(self.blocked[0], self.demand):
                    return
                self.waiting.append(self.blocked.popleft())
            if len(self.groups) == GROUPS_AHEAD or (item := self.demand.pop()) is None:
                return
            group = _Group(*item)
            self.groups.append(group)
            for shard in group.shards:
                self.shards.needed[shard] += 1
                if shard not in self.shards.on_disk:
                    self.blocked.append(shard)
                elif self.shards.needed[shard] == 1 and shard not in self.shards.verified:
                    self._verify(shard, new=False)  # an earlier recorder left it

    def _flush(self) -> None:
        """Have workers without another shard report what they have computed."""
        busy = {id(worker) for worker, _ in self.running.values()}
        for worker in set(self.written.values()):
            if id(worker) not in busy:
                self.running[worker.call("flush")] = worker, _FLUSH

    def _collect(self, future: Future[Outcome]) -> None:
        worker, number = self.running.pop(future)
        if worker not in self.pool.workers:  # an earlier call has shown that it has ended
            self._give_to_others(worker, number)
            return
        try:
            outcome = future.result()
        except (*self.pool.lost, CancelledError) as error:
            self._give_to_others(worker, number)
            self.attempts[number] += number != _FLUSH
            self.pool.drop(worker, error, final=self.attempts[number] == MAX_ATTEMPTS)
            return
        files = self.pool.value_of(worker, outcome)
        if number != _FLUSH:
            self.written[number] = worker
        for file in files:
            if self.written.pop(shard_number(file), None) is not None:
                self._verify(shard_number(file), new=True)
        if number == _FLUSH:  # nothing should be left
            self._give_to_others(worker, number)

    def _give_to_others(self, worker: Worker, number: int) -> None:
        """Have others record a shard, and all that a worker has not reported as committed."""
        lost = [n for n, one in self.written.items() if one is worker]
        for one in (*lost, *[number] * (number != _FLUSH)):
            self.written.pop(one, None)
            self.waiting.appendleft(one)

    def _verify(self, number: int, *, new: bool) -> None:
        self.verifying[self.verifiers.submit(self.shards.read, number)] = number, new

    def _collect_verified(self, future: Future[WrittenShard]) -> None:
        number, new = self.verifying.pop(future)
        file = self.shards.plan.shards[number].file
        try:
            self.shards.add_verified(number, future.result(), new=new)
            del self.attempts[number]  # a long training may lose it again in a later epoch
        except DamagedShardError as error:
            self.attempts[number] += 1
            if self.attempts[number] == MAX_ATTEMPTS:
                raise UserError(
                    f"the shard is damaged {MAX_ATTEMPTS} times in a row: {error}",
                    where=self.shards.folder / file,
                    do="check the disk; the same command goes on after the last checkpoint",
                ) from None
            self.shards.monitor.say(f"{file}: {error}; it is recorded again")
            self.shards.delete_files(number)
            self.waiting.appendleft(number)  # its room stays reserved: a group waits for it

    def _announce(self) -> None:
        """Tell the training which groups are there."""
        progress, ready = self.progress, self.progress.ready
        for group in self.groups:
            if group.number >= ready:
                missing = [n for n in group.shards if n not in self.shards.verified]
                if progress.ready == progress.first == group.number:
                    self._show_first(group, missing)
                if missing:
                    break
                ready = group.number + 1
        progress.ready = ready
        self.announce()

    def _show_first(self, group: _Group, missing: list[int]) -> None:
        """Show how far the first group is, for which the training waits."""
        plan = self.shards.plan.shards
        tokens, left = (sum(plan[n].tokens for n in one) for one in (group.shards, missing))
        self.show(tokens - left, tokens)
