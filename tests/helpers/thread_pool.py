"""A pool whose workers are threads of the test, with faults that tests choose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.recipe.recipe import Recipe
from draftlab.workers.pool import CallHandler, LocalPool, Outcome, Worker


class LostError(Exception):
    """A worker has ended."""


class ThreadWorker(Worker):
    """A worker that is a thread.

    Args:
        faults: a call's number → what happens in its place: an error, or the worker's end.
    """

    def __init__(
        self, recipe: Recipe, run: Path, name: str, faults: dict[int, Exception], calls: Counter
    ) -> None:
        self.name, self.log = name, run / f"{name}.log"
        self._handler, self._faults, self._calls = CallHandler(recipe, run), faults, calls
        self._thread = ThreadPoolExecutor(1, name)

    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        return self._thread.submit(self._call, method, arguments)

    def _call(self, method: str, arguments: Sequence[Any]) -> Outcome:
        self._calls[method] += 1
        fault = self._faults.pop(self._calls["record_ahead"], None)
        if isinstance(fault, LostError):
            raise fault
        if fault is not None:
            return Outcome(error=fault if isinstance(fault, UserError) else UserError(str(fault)))
        return self._handler.call(method, arguments)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        # The threads that write its shards end, too, as those of a process do.
        end = LostError("closed")
        self._handler._worker._open.__exit__(LostError, end, None)


class ThreadPool(LocalPool):
    """A pool of threads in place of processes.

    Attributes:
        faults: of all workers together, by the number of the call of `record_ahead`.
        calls: of each method.
    """

    lost = (LostError,)

    def __init__(
        self,
        *arguments: Any,
        faults: dict[int, Exception] | None = None,
        num_workers: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.num_workers, self.faults, self.calls = num_workers, faults or {}, Counter()

    def start_workers(self, num_tasks: int) -> None:
        while len(self.workers) < self.num_workers:
            name = f"thread {len(self.workers) + 1}"
            arguments = (name, self.faults, self.calls)
            self.workers.append(ThreadWorker(self.recipe, self.run_folder, *arguments))
