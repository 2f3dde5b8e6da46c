"""The state of the window (train/window.json), which rank 0 writes and the other ranks read."""

from __future__ import annotations

import time
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import read_json, write_json

STATE = "window.json"
"""In the folder of the training."""
BEAT_S = 5.0
"""Longest time between two writes, in seconds."""
SILENCE_S = 180.0
"""Time without a write after which the other ranks end."""
POLL_S = 0.2


class WindowState:
    """The file, which rank 0 writes.

    Args:
        path: of the file.
        session: a text that no earlier training in this folder had.
    """

    def __init__(self, path: Path, session: str) -> None:
        self.path, self.session = path, session
        self._last: tuple[int, bool] | None = None
        self._written, self._beat = 0.0, 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, ready: int, error: UserError | None) -> None:
        """Write how many groups are there, and the error of the recording, if that is news."""
        news = (ready, error is not None)
        if news == self._last and time.monotonic() < self._written + BEAT_S:
            return
        self._last, self._written, self._beat = news, time.monotonic(), self._beat + 1
        fields = {"session": self.session, "beat": self._beat, "ready": ready}
        if error is not None:
            fields["error"] = {"what": error.what, "where": str(error.where), "do": error.do}
        write_json(self.path, fields)


class WindowFollower:
    """A `WindowFeed` of the ranks whose window rank 0 has filled.

    Args:
        state: the file as rank 0 writes it.
    """

    def __init__(self, state: WindowState) -> None:
        self.path, self.session = state.path, state.session
        self._ready, self._ended = 0, False
        self._beat, self._heard = -1, time.monotonic()

    def __enter__(self) -> WindowFollower:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, finished_groups: int) -> None:
        self._heard = time.monotonic()

    def wait(self, group: int) -> bool:
        waited = False
        while self._ready <= group:
            if self._ended:
                raise InterruptedError("the training has ended")
            self._read()
            if self._ready <= group:
                waited = True
                time.sleep(POLL_S)
        return waited

    def report_finished_groups(self, count: int) -> None:
        pass

    def share_waited(self) -> float | None:
        return None

    def stop(self) -> None:
        self._ended = True

    def _read(self) -> None:
        try:
            fields = read_json(self.path) if self.path.exists() else {}
        except OSError:  # NFS: another machine has replaced the open file (ESTALE)
            fields = {}
        if fields.get("session") == self.session:
            if fields["beat"] != self._beat:
                self._beat, self._heard = fields["beat"], time.monotonic()
            if error := fields.get("error"):
                raise UserError(error["what"], where=error["where"], do=error["do"])
            self._ready = fields["ready"]
        if time.monotonic() > self._heard + SILENCE_S:
            raise UserError(
                f"expected rank 0 to record the window, heard nothing of it for {SILENCE_S:g} s",
                where=self.path,
                do="look at its log; the same command goes on after the last checkpoint",
            )
