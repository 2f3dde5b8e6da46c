"""Where lines of progress go."""

from __future__ import annotations


class Monitor:
    """Where a room's lines and progress go. This one swallows them; the CLI's prints them."""

    def say(self, line: str) -> None:
        """A finished line: a count, a default that was chosen, something dropped."""

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        """How far a stage is; `detail` is a short text such as "1,024 tokens/s"."""
