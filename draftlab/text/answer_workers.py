"""Answer workers: the target's engine in this process, and in one process per further device."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.errors import UserError
from draftlab.formatting import exit_text
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target
from draftlab.target_model.locate import resolve_device
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings

_SPAWN = get_context("spawn")  # CUDA does not work in a fork of a process that has used it
Item = TypeVar("Item")

Decode = Callable[[Sequence[Request], int], Iterator[Generation]]
"""A function that decodes requests, in any order. Its second argument is the maximum length of a
prompt and its answer together, in tokens."""


class _FirstLine(Monitor):
    """Passes on the first line only: every piece of the prompts has an engine of its own."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._pass_on: Callable[[str], None] | None = say

    def say(self, line: str) -> None:
        pass_on, self._pass_on = self._pass_on, None
        if pass_on is not None:
            pass_on(line)


def engine_decode(
    target: Target | TargetMetadata, batch: int, monitor: Monitor | None = None
) -> Decode:
    """Return a `Decode` that runs the target's own engine on `batch` requests at once.

    Args:
        monitor: told once if memory is short for so many requests.
    """
    if isinstance(target, TargetMetadata):
        raise ValueError("expected a loaded target or `decode`, found the target's metadata only")
    first_line = _FirstLine((monitor or Monitor()).say)

    def decode(requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        size = min(batch, len(requests))
        engine = Engine(
            target, batch=size, max_length=max_length, cpu_prepacked=True, monitor=first_line
        )
        return engine.generate(requests)

    return decode


class _Line(NamedTuple):
    """A line that a worker process reports."""

    text: str


class WorkerProcess:
    """A `Decode` that runs in its own process."""

    def __init__(self, settings: TargetSettings, device: str, batch: int, monitor: Monitor) -> None:
        self.device, self.monitor = device, monitor
        self._connection, child = _SPAWN.Pipe()
        settings = settings.model_copy(update={"device": device})
        self._process = _SPAWN.Process(target=_serve, args=(child, settings, batch), daemon=True)
        self._process.start()
        child.close()  # so that this process notices when the worker ends

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        with suppress(OSError):  # the worker has ended; its last message is read below
            self._connection.send((requests, max_length))
        try:
            while (message := self._connection.recv()) is not None:
                if isinstance(message, str):
                    raise self._error(message)
                if isinstance(message, _Line):
                    self.monitor.say(f"{self.device}: {message.text}")
                else:
                    yield message
        except (EOFError, OSError):
            self._process.join()
            raise self._error(f"it ended ({exit_text(self._process.exitcode)})") from None

    def _error(self, reason: str) -> UserError:
        return UserError(
            f"the answer process on {self.device} failed: {reason}",
            do="run the same command again, with fewer GPUs if it fails again: finished answers "
            "are kept",
        )

    def close(self) -> None:
        """Terminate the process."""
        self._process.terminate()
        self._process.join()
        self._connection.close()


@contextmanager
def start_answer_workers(
    settings: TargetSettings, devices: Sequence[str], batch: int, monitor: Monitor
) -> Iterator[list[Decode]]:
    """Start one worker process on each device for the duration of the block.

    Args:
        settings: the target's; each process loads it.
        batch: prompts that each process decodes at once.
        monitor: receives their lines.
    """
    with ExitStack() as stack:
        workers = []
        for device in devices:
            workers.append(WorkerProcess(settings, device, batch, monitor))
            stack.callback(workers[-1].close)
        yield workers


def _serve(connection: Connection, settings: TargetSettings, batch: int) -> None:
    """Decode requests until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    try:
        device = resolve_device(settings.device)
        if device.type == "cuda":  # streams, events and graphs use the current device
            torch.cuda.set_device(device)
        monitor = _FirstLine(lambda line: connection.send(_Line(line)))
        decode = engine_decode(load_target(settings), batch, monitor)
        while True:
            for generation in decode(*connection.recv()):
                connection.send(generation)
            connection.send(None)
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        text = str(error).replace("\n", "; ")
        message = text if isinstance(error, UserError) else f"{type(error).__name__}: {text}"
        connection.send(message)
        os._exit(1)  # without waiting for threads


def map_in_order(
    function: Callable[[Item, Decode], None],
    items: Sequence[Item],
    workers: Sequence[Decode],
    stop: Callable[[], None],
) -> Iterator[Item]:
    """Apply `function` to each item and a free worker; yield the finished items in their order.

    A single worker runs in the caller's thread, several in a thread each. Close the generator: an
    error, or leaving it early, stops all threads.

    Args:
        stop: makes running calls of `function` return early.
    """
    if len(workers) == 1:
        for item in items:
            function(item, workers[0])
            yield item
        return
    free: SimpleQueue[Decode] = SimpleQueue()
    for worker in workers:
        free.put(worker)

    def call(item: Item) -> Item:
        worker = free.get()
        try:
            function(item, worker)
        finally:
            free.put(worker)
        return item

    with ThreadPoolExecutor(len(workers), "answers") as pool:
        try:
            yield from pool.map(call, items)
        finally:
            stop()
            pool.shutdown(cancel_futures=True)
