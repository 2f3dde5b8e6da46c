"""The thread that makes the shards of a window, without workers, and what other ranks see."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.workers.pool import MAX_ATTEMPTS
from draftlab.workers.window import recorder
from draftlab.workers.window.recorder import WindowFollower, WindowSession, WindowState
from draftlab.workers.window.shards import DamagedShardError


def session(**pool: Any) -> WindowSession:
    shards: Any = SimpleNamespace(
        plan=SimpleNamespace(shards=[SimpleNamespace(file="shard-00000.safetensors")]),
        folder=Path("store"),
        add_verified=lambda *_, **__: None,
        delete_files=lambda _: None,
    )
    workers: Any = SimpleNamespace(workers=[], start_workers=lambda _: None, **pool)
    nothing: Any = None
    return WindowSession(shards, [], 0, workers, nothing, Monitor())


def verify(session: WindowSession, error: Exception | None) -> None:
    future: Future[Any] = Future()
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
    session.verifying[future] = 0, True
    session._collect_verified(future)


def test_a_shard_that_is_damaged_several_times_in_a_row_ends_the_run() -> None:
    one = session()
    for _ in range(MAX_ATTEMPTS - 1):
        verify(one, DamagedShardError("other bytes"))
    with pytest.raises(UserError, match="damaged 3 times in a row"):
        verify(one, DamagedShardError("other bytes"))


def test_a_shard_that_is_damaged_once_in_each_of_many_epochs_does_not() -> None:
    one = session()
    for _ in range(2 * MAX_ATTEMPTS):
        verify(one, DamagedShardError("other bytes"))
        verify(one, None)
    assert len(one.tasks.waiting) == 2 * MAX_ATTEMPTS


def test_a_shard_whose_call_was_cancelled_with_its_worker_is_given_to_others() -> None:
    """`concurrent.futures.wait` does not return a call that was cancelled before it began."""
    one, call, worker = session(), Future[Any](), cast(Any, object())
    one.tasks.running[call] = worker, 0
    one.written[1] = worker
    call.cancel()
    one.step(0)
    assert sorted(one.tasks.waiting) == [0, 1]
    assert one.tasks.running == one.written == {}


def test_what_waits_to_be_verified_is_left_when_the_training_ends() -> None:
    one, future = session(), Future[Any]()
    one.verifying[future] = 0, True
    one.cancel()
    assert future.cancelled()


def test_a_rank_reads_again_what_a_network_file_system_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = WindowState(tmp_path / "window.json", "session")
    state.write(1, None)
    plain, faults = recorder.read_json, [OSError(errno.ESTALE, "Stale file handle")]

    def read(path: Path) -> Any:
        if faults:
            raise faults.pop()
        return plain(path)

    monkeypatch.setattr(recorder, "read_json", read)
    assert WindowFollower(state).wait(0)
    assert not faults
