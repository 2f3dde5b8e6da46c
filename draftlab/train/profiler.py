"""Where the time of training goes, without making the device or the host wait for it."""

from __future__ import annotations

import time
from typing import Any

import torch

NOT_TRAINING = "outside"
"""The phase of what is no training: validation and checkpoints."""


class PhaseTimer:
    """Cuts the time since `start` into named phases.

    On a GPU it is the GPU's own time: a mark is an event behind the work that was queued before it,
    so a phase is what its work took, and what the GPU idled waiting for it. Elsewhere it is the
    host's.

    Args:
        device: that does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def start(self) -> None:
        """Forgets what was marked; the first phase begins here."""
        self._marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """Ends a phase; one of the same name may follow later, and adds to it."""
        self._marks.append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Seconds of each phase since `start`; waits for the last, and starts anew there."""
        if self.on_gpu:
            self._marks[-1][1].synchronize()
        found: dict[str, float] = {}
        for (_, before), (phase, now) in zip(self._marks, self._marks[1:], strict=False):
            seconds = before.elapsed_time(now) / 1e3 if self.on_gpu else now - before
            found[phase] = found.get(phase, 0.0) + seconds
        self._marks = self._marks[-1:]
        return found

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
