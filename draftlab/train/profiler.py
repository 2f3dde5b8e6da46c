"""A timer of the phases of training, for which neither the GPU nor the host waits."""

from __future__ import annotations

import time
from typing import Any

import torch

NOT_TRAINING = "outside"
"""The phase of validation and checkpoints."""


class PhaseTimer:
    """Measures the time since `start` in named phases.

    On a GPU it measures the GPU's time: a mark is an event behind the queued work, so a phase lasts
    as long as its work and the GPU's idle time before it. Elsewhere it measures the host's time.

    Args:
        device: the device that trains.

    Attributes:
        totals: seconds of each phase since the timer was made, as far as they were read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []
        self.totals: dict[str, float] = {}

    def start(self) -> None:
        """Drop all marks and begin the first phase."""
        self._marks = [("", self._now())]

    def mark(self, phase: str) -> None:
        """End a phase; phases of the same name add up."""
        self._marks.append((phase, self._now()))

    def read(self) -> dict[str, float]:
        """Return the seconds of each phase up to the last mark, where time starts anew."""
        if self.on_gpu:
            self._marks[-1][1].synchronize()
        phases: dict[str, float] = {}
        for (_, before), (phase, now) in zip(self._marks, self._marks[1:], strict=False):
            seconds = before.elapsed_time(now) / 1e3 if self.on_gpu else now - before
            phases[phase] = phases.get(phase, 0.0) + seconds
        self._marks = self._marks[-1:]
        for phase, seconds in phases.items():
            self.totals[phase] = self.totals.get(phase, 0.0) + seconds
        return phases

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event
