"""Locks that do not work are refused; what killed processes left is removed."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.files import atomic_folder, atomic_path, check_locks, remove_leftovers
from draftlab.run.folder import lock, write_recipe
from tests.helpers.table_target import record_table, samples_of_lengths

SAMPLES = samples_of_lengths([12, 9])


def no_locks(*_: object) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize(
    ("flock", "words"),
    [(no_locks, "without: .*not implemented"), (lambda *_: None, "keep others out")],
)
@pytest.mark.parametrize(
    "use", [lambda folder: record_table(folder, SAMPLES), lambda folder: lock(folder).__enter__()]
)
def test_a_file_system_without_locks_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flock: Callable[..., None],
    words: str,
    use: Callable[[Path], object],
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=words) as caught:
        use(tmp_path)
    assert str(tmp_path) in caught.value.where
    assert "Lustre mounted with `flock`" in caught.value.do
    assert list(tmp_path.iterdir()) == []


def test_a_folders_lock_is_that_of_a_file_open_for_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS refuses an exclusive lock of anything else with EBADF, so that of a folder, too."""
    flock = fcntl.flock

    def nfs_flock(descriptor: int, kind: int) -> None:
        access = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        if kind & fcntl.LOCK_EX and access == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", nfs_flock)
    record_table(tmp_path, SAMPLES).verify()


def test_processes_of_equal_numbers_check_locks_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in two containers, each of which numbers its processes from 1 on."""
    flock, calls = fcntl.flock, []

    def another_in_between(descriptor: int, kind: int) -> None:
        calls.append(kind)
        number = len(calls)
        flock(descriptor, kind)
        if number == 1:
            check_locks(tmp_path)

    monkeypatch.setattr(fcntl, "flock", another_in_between)
    check_locks(tmp_path)
    assert len(calls) == 4
    assert list(tmp_path.iterdir()) == []


def dead_pid() -> int:
    """Return the id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_killed_processes_are_removed_by_the_next_run(tmp_path: Path) -> None:
    folder, pid = tmp_path / "runs" / "x", dead_pid()
    alive = [folder / f"head/.model.safetensors.{os.getpid()}.tmp", tmp_path / f"runs/.latest.{1}"]
    files = ("head/.model.safetensors", "stages/.head.json", "train/.verified.json")
    dead = [folder / f"{name}.{pid}.tmp" for name in files]
    kept = [folder / "head/.hidden", folder / "head/.x.tmp", folder / f"head/model.{pid}.tmp"]
    tree = folder / f"export/.speculators.{pid}.tmp"
    for path in (*alive, *dead, *kept, tree / "model.safetensors"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    link = tmp_path / f"runs/.latest.{pid}"
    link.symlink_to("x")
    with lock(folder):
        write_recipe(folder, "seed: 1")
    assert not any(path.exists() for path in (*dead, tree))
    assert not link.is_symlink()
    assert all(path.exists() for path in (*alive, *kept, tmp_path / "runs/latest"))


def test_leftovers_in_a_linked_folder_stay(tmp_path: Path) -> None:
    """In a run folder only the store may be a link; what is in it belongs to who records it."""
    leftover, run = tmp_path / f"disk/.x.{dead_pid()}.tmp", tmp_path / "run"
    for folder in (leftover.parent, run):
        folder.mkdir()
    leftover.write_text("")
    (run / "store").symlink_to(leftover.parent)
    with lock(run):
        pass
    remove_leftovers(run / "store")
    assert leftover.exists()


def test_a_file_that_is_being_written_is_no_leftover(tmp_path: Path) -> None:
    with atomic_path(tmp_path / "file") as temporary:
        temporary.write_text("whole")
        remove_leftovers(tmp_path)
    assert (tmp_path / "file").read_text() == "whole"


def test_folders_that_killed_writers_left_are_removed_when_there_is_a_new_one(
    tmp_path: Path,
) -> None:
    killed = subprocess.Popen(["true"])
    killed.wait()
    for name in (f".c.{killed.pid}.tmp", f".c.old.{killed.pid}.tmp", f".c.{os.getppid()}.tmp"):
        (tmp_path / name).mkdir()
    with pytest.raises(RuntimeError), atomic_folder(tmp_path / "c"):
        raise RuntimeError
    left = {f".c.old.{killed.pid}.tmp", f".c.{os.getppid()}.tmp"}
    assert {path.name for path in tmp_path.iterdir()} == left
    for content in ("first", "second"):
        with atomic_folder(tmp_path / "c") as folder:
            (folder / content).touch()
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"c", f".c.{os.getppid()}.tmp"}
        assert [path.name for path in (tmp_path / "c").iterdir()] == [content]
