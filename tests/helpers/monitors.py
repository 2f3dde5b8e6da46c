"""A monitor that records what it is told."""

from __future__ import annotations

from collections import Counter

from draftlab.progress import Monitor


class RecordingMonitor(Monitor):
    """Records all lines, the last `progress` call, and how often each stage was reported done."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.last_progress: tuple = ()
        self.times_done: Counter[str] = Counter()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        self.last_progress = (stage, done, total, detail)
        self.times_done[stage] += done >= total
