"""Copies the checkpoints of a training to `run.url`, in a thread beside the training."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.formatting import size_text
from draftlab.pipeline.run_copy import RunCopy
from draftlab.progress import Monitor
from draftlab.store.url_claim import LostClaimError
from draftlab.train.best_head import STATE as BEST
from draftlab.train.checkpoint import STATE, step_of


@dataclass(frozen=True)
class Snapshot:
    """The files of a checkpoint, with the metrics and the best head of the same moment.

    Most are hard links, so that the training may remove or replace its own files meanwhile.

    Attributes:
        folder: holds nothing else.
        step: of the checkpoint.
    """

    folder: Path
    step: int

    @classmethod
    def take(cls, checkpoint: Path) -> Snapshot:
        """Take a snapshot of a checkpoint that was just written."""
        train = checkpoint.parents[1]
        folder = train / f".{checkpoint.name}.copy.{os.getpid()}.tmp"  # removed if this is killed
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for path in checkpoint.iterdir():
            _link(path, folder / path.name)
        if (metrics := train / "metrics.jsonl").is_file():
            shutil.copyfile(metrics, folder / metrics.name)  # rows are appended to it
        if (train / "best" / BEST).is_file():
            (folder / "best").mkdir()
            for path in (train / "best").iterdir():
                _link(path, folder / "best" / path.name)
        return cls(folder, step_of(checkpoint))

    def files(self) -> dict[str, Path]:
        """Return the files by their names in the folder."""
        paths = [path for path in sorted(self.folder.rglob("*")) if path.is_file()]
        return {path.relative_to(self.folder).as_posix(): path for path in paths}

    def remove(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _link(path: Path, target: Path) -> None:
    try:
        os.link(path, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(path, target)


class CheckpointCopies:
    """Copies checkpoints one after the other. At most one waits: a newer one takes its place.

    A copy that fails is reported, and the training goes on: the next checkpoint tries again.

    Args:
        copy: of the run, which another process or this one has claimed.
        monitor: receives lines.
    """

    def __init__(self, copy: RunCopy, monitor: Monitor) -> None:
        self.copy, self.monitor = copy, monitor
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._ended, self._error = False, None
        self._thread = threading.Thread(target=self._run, name="checkpoint copies", daemon=True)
        self._thread.start()

    _error: Exception | None

    def add(self, checkpoint: Path) -> None:
        """Have a checkpoint copied that was just written.

        Raises:
            LostClaimError: another process goes on with the run.
        """
        self._raise_error()
        if not read_json(checkpoint / STATE)["verified"]:
            self.monitor.say(
                f"run.url: the checkpoint of step {step_of(checkpoint)} is not copied, since not "
                "all shards of the store have been hashed yet"
            )
            return
        snapshot = Snapshot.take(checkpoint)
        with self._changed:
            left_out, self._waiting = self._waiting, snapshot
            self._changed.notify()
        if left_out is not None:
            left_out.remove()
            self.monitor.say(
                f"run.url: the checkpoint of step {left_out.step} is not copied, since the copy of "
                "an earlier one still runs: a higher train.checkpoint_every avoids that"
            )

    def close(self) -> None:
        """Wait until the last checkpoint is copied.

        Raises:
            LostClaimError: another process goes on with the run.
        """
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()
        self._raise_error()

    def abandon(self) -> None:
        """Let the copy in progress end, without repeating what fails, and drop the waiting one."""
        self.copy.stop_retrying()
        with self._changed:
            if self._waiting is not None:
                self._waiting.remove()
            self._waiting, self._ended = None, True
            self._changed.notify()
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._waiting is not None)
                snapshot, self._waiting = self._waiting, None
            if snapshot is None:
                return
            try:
                self._push(snapshot)
            except Exception as error:  # the training raises it
                self._error = error
                return
            finally:
                snapshot.remove()

    def _push(self, snapshot: Snapshot) -> None:
        """Copy a checkpoint; report a failure that may pass.

        Raises:
            LostClaimError: another process goes on with the run.
        """
        files, started = snapshot.files(), time.monotonic()
        size = size_text(sum(path.stat().st_size for path in files.values()))
        try:
            self.copy.push_checkpoint(snapshot.step, files)
        except LostClaimError:
            raise
        except UserError as error:
            self.monitor.say(
                f"warning: the checkpoint of step {snapshot.step} is not at {error.where}: "
                f"{error.what}; the training goes on, and the next checkpoint is tried again"
            )
            return
        self.monitor.say(
            f"run.url: the checkpoint of step {snapshot.step} is at {self.copy.remote.url} "
            f"({size}, {time.monotonic() - started:.0f} s)"
        )


@contextmanager
def copying(copy: RunCopy, monitor: Monitor) -> Iterator[CheckpointCopies]:
    """Yield what copies checkpoints; at the end, or at a signal, wait for the last one."""
    copies = CheckpointCopies(copy, monitor)
    try:
        yield copies
    except SystemExit:  # a signal, at which the training has written a checkpoint
        with suppress(LostClaimError):
            copies.close()
        raise
    except BaseException:
        copies.abandon()
        raise
    copies.close()
