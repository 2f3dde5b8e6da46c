"""The arguments of a stage on a Ray cluster, and the relay of its lines to the console."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.queue import Empty, Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe
from draftlab.workers.ray_nodes import print_to_log

POLL_S = 0.2
PROGRESS_S = 0.5
"""Least time between two reports of progress."""


@dataclass(frozen=True)
class StageTask:
    """The arguments of a stage for a process on a node.

    Attributes:
        recipe: with the devices on the cluster.
        run: the run folder, absolute.
        folder: the driver's working directory.
        queue: takes what the driver's console shows.
        signals: gives the number of a signal at which the training ends.
    """

    recipe: Recipe
    run: Path
    folder: str
    queue: Queue
    signals: Queue | None = None


class QueueMonitor(Monitor):
    """Passes lines and progress to the driver, and lines to the node's log.

    Args:
        queue: None: nothing is passed on, as of all ranks but the first.
    """

    def __init__(self, queue: Queue | None) -> None:
        self._queue, self._last = queue, 0.0

    def say(self, line: str) -> None:
        print_to_log(line)
        if self._queue is not None:
            self._queue.put(("say", line))

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        now = time.monotonic()
        if self._queue is not None and (done >= total or now - self._last > PROGRESS_S):
            self._last = now
            self._queue.put(("progress", stage, done, total, detail))


def new_queue() -> Queue:
    """Return a queue on the node of this process, which no other node takes away."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})


def relay(
    queue: Queue,
    monitor: Monitor,
    work: Callable[[], Any],
    on_poll: Callable[[], None] = lambda: None,
) -> None:
    """Show what comes through a queue while some work runs in another thread.

    Args:
        on_poll: called again and again meanwhile.

    Raises:
        UserError: the first error that came through the queue.
        Exception: what the work raised, if no error came.
    """
    errors: list[UserError] = []
    future: Future[Any] = Future()
    # Unlike a pool's, this thread does not keep an interrupted process waiting.
    threading.Thread(target=_run_into, args=(future, work), daemon=True).start()
    ended = False
    while not ended:
        on_poll()
        ended = future.done()  # what was sent before is shown below
        with suppress(Empty):
            while True:
                kind, *arguments = queue.get(timeout=POLL_S)
                if kind == "error":
                    errors += arguments
                else:
                    getattr(monitor, kind)(*arguments)
    if errors:
        raise errors[0]
    future.result()


def _run_into(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
