"""A pool hands out tasks, and gives those of workers that end to others."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.workers.pool import Outcome, Worker, WorkerLostError, WorkerPool
from tests.helpers.monitors import RecordingMonitor


class FakeWorker(Worker):
    """A worker that doubles numbers in a thread.

    Args:
        ends_at: the task at which it ends.
    """

    def __init__(self, name: str, log: Path, ends_at: Callable[[int], bool]) -> None:
        self.name, self.log, self.ends_at = name, log, ends_at
        self.tasks: list[Any] = []
        self.ended = False
        self._thread = ThreadPoolExecutor(1)

    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        return self._thread.submit(self._call, method, *arguments)

    def _call(self, method: str, task: int = -1) -> Outcome:
        if self.ended or self.ends_at(task):
            self.ended = True
            raise WorkerLostError("killed by SIGKILL")
        if method == "fail":
            return Outcome(lines=["about to fail"], error=UserError("no", where="x", do="y"))
        time.sleep(0.002)
        self.tasks.append(task)
        return Outcome(2 * task, ["loaded"])

    def close(self) -> None:
        self._thread.shutdown()


class FakePool(WorkerPool):
    lost = (WorkerLostError,)

    def __init__(self, log: Path, *ends_at: Callable[[int], bool], spare: int = 0) -> None:
        super().__init__(RecordingMonitor())
        self.log, self.spare = log, spare
        self.new = [FakeWorker(f"node {i}", log, end) for i, end in enumerate(ends_at)]
        self.all = list(self.new)

    def start_workers(self, num_tasks: int) -> None:
        self.workers += self.new
        self.new.clear()
        if not self.workers:
            raise UserError("no workers")


def never(_: int) -> bool:
    return False


class CancellingWorker(FakeWorker):
    """A worker that ends at its first call; its other calls are cancelled before they begin."""

    def __init__(self, log: Path) -> None:
        super().__init__("node 9", log, never)
        self.calls: list[Future[Outcome]] = []

    def call(self, method: str, *arguments: Any) -> Future[Outcome]:
        self.calls.append(Future())
        if len(self.calls) == 1:
            self.calls[0].set_exception(WorkerLostError("killed by SIGKILL"))
        return self.calls[-1]

    def close(self) -> None:
        for call in self.calls:
            call.cancel()


@pytest.mark.timeout(60)
def test_calls_that_were_cancelled_before_they_began_are_done_by_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with FakePool(log, never) as pool:
        pool.new.insert(0, CancellingWorker(log))
        assert sorted(pool.run("double", range(6))) == [(i, 2 * i) for i in range(6)]
    assert len(pool.all[0].tasks) == 6


def test_every_task_is_done_once_and_lines_are_said_once(tmp_path: Path) -> None:
    with FakePool(tmp_path / "log", never, never, never) as pool:
        results = list(pool.run("double", range(30)))
    assert sorted(results) == [(i, 2 * i) for i in range(30)]
    assert all(len(worker.tasks) > 3 for worker in pool.all)
    assert sum("loaded" in line for line in pool.monitor.lines) == 1


def test_the_tasks_of_a_worker_that_ends_are_done_by_others(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("CUDA error")
    with FakePool(log, never, lambda task: task >= 4) as pool:
        results = list(pool.run("double", range(12)))
        assert sorted(results) == [(i, 2 * i) for i in range(12)]
        assert len(pool.workers) == 1
    lines = [line for line in pool.monitor.lines if "node 1 ended (killed by SIGKILL)" in line]
    assert len(lines) == 1
    assert f"its log: {log}; its work is done by others" in lines[0]


def test_a_task_at_which_three_workers_end_ends_the_run(tmp_path: Path) -> None:
    pool = FakePool(tmp_path / "log", *[lambda task: task == 5] * 6)
    with pool, pytest.raises(UserError, match=r"node \d ended \(killed by SIGKILL\)"):
        list(pool.run("double", range(12)))
    assert sum(worker.ended for worker in pool.all) == 3


def test_an_error_names_the_worker(tmp_path: Path) -> None:
    pool = FakePool(tmp_path / "log", never)
    with pool, pytest.raises(UserError) as caught:
        list(pool.run("fail", [1]))
    assert (caught.value.what, caught.value.where, caught.value.do) == ("node 0: no", "x", "y")
    assert "node 0: about to fail" in pool.monitor.lines


def test_finishing_goes_on_while_a_worker_is_left(tmp_path: Path) -> None:
    with FakePool(tmp_path / "log", never, lambda task: task == -1) as pool:
        list(pool.run("double", range(4)))
        pool.finish()
        assert [worker.name for worker in pool.workers] == ["node 0"]
    pool = FakePool(tmp_path / "log", lambda task: task == -1)
    list(pool.run("double", range(4)))
    with pool, pytest.raises(UserError, match="node 0 ended"):
        pool.finish()
