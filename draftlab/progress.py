"""The interface through which all rooms report what they do."""

from __future__ import annotations


class Monitor:
    """Receives lines and progress, and ignores them. The command line's monitor prints them."""

    def say(self, line: str) -> None:
        """Report a line: a count, a default that was chosen, something that was dropped."""

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        """Report how far a stage is; `detail` is a short text such as "1,024 tokens/s"."""
