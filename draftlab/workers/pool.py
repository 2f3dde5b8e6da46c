"""Workers that hold the target: one process answers and records on each GPU, and a leader deals.

The leader hands out tasks: a chunk of prompts, or the number of a shard. A task does not depend on
who does it, so that of a worker that ends is done again by another one.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch

from draftlab.errors import UserError
from draftlab.formatting import exit_text
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.signals import end_with
from draftlab.target_model.locate import resolve_device
from draftlab.workers.target_worker import TargetDescription, TargetWorker

_SPAWN = get_context("spawn")  # CUDA does not work in a fork of a process that has used it
POLL_S = 0.2
TASKS_AHEAD = 2
"""Tasks that a worker has at a time, so that it does not wait for the leader."""
MAX_ATTEMPTS = 3
"""Workers that may end at one task before the run does."""


@dataclass(frozen=True)
class Outcome:
    """What a worker returns of a call: its value or error, and lines for the user."""

    value: Any = None
    lines: list[str] = field(default_factory=list)
    error: UserError | None = None


class _Lines(Monitor):
    """Keeps lines until they are taken."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def say(self, line: str) -> None:
        self._lines.append(line)

    def take(self) -> list[str]:
        """Return the lines since the last call."""
        lines, self._lines = self._lines, []
        return lines


class CallHandler:
    """Calls the methods of a `TargetWorker` in a worker process."""

    def __init__(self, recipe: Recipe, run: Path) -> None:
        self._monitor = _Lines()
        self._worker = TargetWorker(recipe, run, self._monitor)

    def call(self, method: str, arguments: Sequence[Any]) -> Outcome:
        """Call a method. The traceback of an error is printed."""
        try:
            value = getattr(self._worker, method)(*arguments)
        except Exception as error:
            traceback.print_exc()
            if not isinstance(error, UserError):
                error = UserError(
                    f"{type(error).__name__}: {error}",
                    do="the worker's log has the traceback of this bug or fault of the machine",
                )
            return Outcome(lines=self._monitor.take(), error=error)
        return Outcome(value, self._monitor.take())


class Worker(ABC):
    """A process that holds the target, with its name for the user, and the file that it prints
    into.
    """

    name: str
    log: Path

    @abstractmethod
    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        """Have a method of its `TargetWorker` called, after all earlier calls."""

    @abstractmethod
    def close(self) -> None:
        """End the process."""


class WorkerPool(ABC):
    """Workers, whose lines the monitor receives, as their leader sees them; a context manager
    that ends them.
    """

    lost: ClassVar[tuple[type[BaseException], ...]]
    """What a call's future raises when its worker has ended."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.workers = monitor, list[Worker]()
        self._said = set[str]()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.close()
        self.workers.clear()

    @abstractmethod
    def start_workers(self, num_tasks: int) -> None:
        """Start workers, if some are missing and there is work for them; raise a `UserError` if
        there are none, and none can be started.
        """

    def describe(self, stage: str) -> TargetDescription:
        """Return what the leader needs to know of the target of a stage."""
        ((_, description),) = self.run("describe", [stage])
        return description

    def run(self, method: str, arguments: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Have a method called with each argument; yield its number and the result as calls end.

        A `UserError` names the worker whose task failed, or at whose task several ended.
        """
        tasks = Tasks(self, method, arguments, range(len(arguments)))
        try:
            while tasks.waiting or tasks.running:
                tasks.hand_out()
                if tasks.running:
                    wait(tasks.running, POLL_S, FIRST_COMPLETED)
                else:
                    time.sleep(POLL_S)
                for _, number, value in tasks.collect():
                    yield number, value
        finally:
            tasks.cancel()

    def finish(self) -> None:
        """Wait until the workers have written what they computed; raise a `UserError` if one
        failed, or all of them ended.

        What a worker computed that ends meanwhile is lost.
        """
        finishing = [(worker, worker.call("finish")) for worker in self.workers]
        for number, (worker, future) in enumerate(finishing, 1):
            try:
                outcome = future.result()
            except (*self.lost, CancelledError) as error:
                none_left = number == len(finishing) and self.workers == [worker]
                self.drop(worker, error, final=none_left)
                continue
            self.value_of(worker, outcome)

    def value_of(self, worker: Worker, outcome: Outcome) -> Any:
        """Report the lines of a call, and return its value or raise its error."""
        for line in outcome.lines:
            if line not in self._said:
                self._said.add(line)
                self.monitor.say(f"{worker.name}: {line}")
        if (error := outcome.error) is not None:
            raise UserError(f"{worker.name}: {error.what}", where=error.where, do=error.do)
        return outcome.value

    def drop(self, worker: Worker, error: BaseException, *, final: bool) -> None:
        """Go on without a worker that has ended, or raise a `UserError`."""
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        worker.close()
        log = f"; its log: {worker.log}" if has_text(worker.log) else "; it printed nothing"
        reason = f"{worker.name} ended ({error}){log}"
        if final:
            raise UserError(
                f"expected a worker process to do its work, found that {reason}",
                do="the log may say why (a process that printed nothing may have been killed for "
                "its memory); the same command goes on after the finished tasks",
            )
        self.monitor.say(f"{reason}; its work is done by others")


class Tasks:
    """Calls of one method by the workers of a pool. The task of one that ends is another's.

    Args:
        method, arguments: of `TargetWorker`, and of its calls by the numbers of the tasks.

    Attributes:
        waiting: numbers of the tasks that no worker has.
        running: the calls, with their workers and numbers; None: a call that is no task.
        attempts: how many workers have ended at a task.
    """

    def __init__(
        self, pool: WorkerPool, method: str, arguments: Sequence[Any], waiting: Iterable[int] = ()
    ) -> None:
        self.pool, self.method, self.arguments = pool, method, arguments
        self.waiting = deque(waiting)
        self.running: dict[Future[Outcome], tuple[Worker, int | None]] = {}
        self.attempts = Counter[int]()

    def hand_out(self) -> None:
        """Have workers that have little to do begin with waiting tasks."""
        if self.waiting:
            self.pool.start_workers(len(self.waiting) + len(self.running))
        loads = Counter(id(worker) for worker, _ in self.running.values())
        for load in range(TASKS_AHEAD):
            for worker in self.pool.workers:
                # The last tasks go to those that have nothing to do.
                enough = load == 0 or len(self.waiting) > len(self.pool.workers)
                if self.waiting and enough and loads[id(worker)] == load:
                    number = self.waiting.popleft()
                    call = worker.call(self.method, self.arguments[number])
                    self.running[call] = worker, number
                    loads[id(worker)] += 1

    def collect(self) -> Iterator[tuple[Worker, int | None, Any]]:
        """Yield the workers, numbers and results of the calls that have ended, in their order;
        raise a `UserError` as `WorkerPool.run`.
        """
        # Not by `wait`: it does not return calls that were cancelled before they began.
        for call in [call for call in self.running if call.done()]:
            worker, number = self.running.pop(call)
            is_lost = worker not in self.pool.workers  # an earlier call has shown that it has ended
            try:
                outcome = None if is_lost else call.result()
            except (*self.pool.lost, CancelledError) as error:
                outcome = None
                if number is not None:
                    self.attempts[number] += 1
                final = number is not None and self.attempts[number] == MAX_ATTEMPTS
                self.pool.drop(worker, error, final=final)
            if outcome is not None:
                yield worker, number, self.pool.value_of(worker, outcome)
            elif number is not None:
                self.waiting.appendleft(number)

    def cancel(self) -> None:
        """Cancel the calls that have not begun."""
        for call in self.running:
            call.cancel()


def has_text(log: Path) -> bool:
    return log.is_file() and bool(log.stat().st_size)


class WorkerLostError(Exception):
    """A worker process has ended; the message says how."""


class LocalPool(WorkerPool):
    """Workers on devices of this machine, of which so many (restarts) are started again when
    they end.
    """

    lost = (WorkerLostError,)

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        devices: Sequence[str],
        monitor: Monitor,
        *,
        restarts: int = 0,
    ) -> None:
        super().__init__(monitor)
        self.recipe, self.run_folder, self._restarts = recipe, run, restarts
        self._devices = list(enumerate(devices, 1))

    def start_workers(self, num_tasks: int) -> None:
        """Start a worker on each device, and those again that have ended, as far as allowed."""
        for number, device in self._devices:
            log = self.run_folder / f"worker-{number}.log"
            self.workers.append(LocalWorker(self.recipe, self.run_folder, device, number, log))
        self._devices.clear()
        if not self.workers:
            raise UserError(
                "expected worker processes, found that all of them have ended",
                where=self.run_folder,
                do="run the same command again, with fewer GPUs if it fails again",
            )

    def drop(self, worker: Worker, error: BaseException, *, final: bool) -> None:
        if self._restarts and worker in self.workers and isinstance(worker, LocalWorker):
            self._restarts -= 1
            self._devices.append((worker.number, worker.device))
        super().drop(worker, error, final=final)


class LocalWorker(Worker):
    """A worker process on this machine."""

    def __init__(self, recipe: Recipe, run: Path, device: str, number: int, log: Path) -> None:
        self.name, self.log = f"worker {number} on {device}", log
        self.number, self.device = number, device
        self._connection, child = _SPAWN.Pipe()
        target = recipe.target.model_copy(update={"device": device})
        recipe = recipe.model_copy(update={"target": target})
        log.unlink(missing_ok=True)
        arguments = (child, recipe, run, log, os.getpid())
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        child.close()  # so that this process notices when the worker ends
        self._calls = ThreadPoolExecutor(1, "worker")

    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        return self._calls.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: Sequence[Any]) -> Outcome:
        try:
            self._connection.send((method, arguments))
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            raise WorkerLostError(exit_text(self._process.exitcode or 0)) from None

    def close(self) -> None:
        """End the process; its log stays if it failed and said something."""
        succeeded = self._process.is_alive()
        self._process.terminate()
        self._process.join()
        self._calls.shutdown(cancel_futures=True)
        self._connection.close()
        if succeeded or not has_text(self.log):
            self.log.unlink(missing_ok=True)


def begin_process(log: Path, leader: int) -> None:
    """Have this new process print into a file, and end when its leader ends it or has ended."""
    end_with(leader)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "w", encoding="utf-8") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def _serve(connection: Connection, recipe: Recipe, run: Path, log: Path, leader: int) -> None:
    """Answer calls until the leader closes the connection or ends."""
    begin_process(log, leader)
    device = resolve_device(recipe.target.device)
    if device.type == "cuda":  # streams, events and graphs use the current device
        torch.cuda.set_device(device)
    handler = CallHandler(recipe, run)
    with suppress(EOFError, BrokenPipeError):
        while True:
            connection.send(handler.call(*connection.recv()))
    os._exit(0)  # without waiting for threads


def worker_devices(processes: int, device: str) -> list[str]:
    """Return the devices of so many workers: GPUs from `device` on; raise a `UserError` if the
    machine has fewer.
    """
    main = resolve_device(device)
    if main.type == "cpu":
        return ["cpu"] * processes
    first, available = main.index or 0, torch.cuda.device_count()
    if first + processes > available:
        raise UserError(
            f"expected {processes} GPUs from cuda:{first} on, found {available} in all",
            where="--gpus",
            do="use fewer GPUs",
        )
    return [f"cuda:{first + i}" for i in range(processes)]
