"""Drafts by batch size and rates of steps, from the steps that a report has timed (servers §13)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from draftlab.evaluate.calibration.result import Calibration
from draftlab.evaluate.results import Report

VLLM = "vllm"
"""The start of the engine name in rows that were measured in vLLM."""


@dataclass(frozen=True)
class Source:
    """The engine, its version and the device that steps were timed on."""

    engine: str
    version: str
    device: str

    @property
    def is_vllm(self) -> bool:
        """Whether vLLM itself was timed."""
        return self.engine.startswith(VLLM)

    def __str__(self) -> str:
        """Return the words for a table, which say whose engine it was."""
        name = f"{self.engine} {self.version} on {self.device}"
        return name if self.is_vllm else f"draftlab's engine, not yours ({name})"


@dataclass(frozen=True)
class MeasuredSteps:
    """Steps of one batch size and number of drafts.

    Attributes:
        batch: requests decoded at once.
        k: drafts a step; 0: none.
        step_ms: their mean time.
        speedup: tokens a second over those without drafts.
    """

    batch: int
    k: int
    step_ms: float | None
    speedup: float | None


def measured_steps(
    report: Report, calibration: Calibration
) -> tuple[Source | None, list[MeasuredSteps]]:
    """Return the steps of the calibrated head, temperature and drafter setting, and their source.

    vLLM's come first; then those of draftlab's engine under load, where the number of requests
    stays the same; then its timed batches. Without two batch sizes there are none.
    """

    def wanted(one: Any) -> bool:
        names = ("head", "temperature", "draft_probs")
        return all(getattr(one, name) == getattr(calibration, name) for name in names)

    rows = [row for row in report.rows if wanted(row)]
    timed: dict[Source, list[MeasuredSteps]] = defaultdict(list)
    under_load: dict[Source, list[MeasuredSteps]] = defaultdict(list)
    for row in rows:
        source = Source(row.engine, row.engine_version, row.device)
        timed[source] += [MeasuredSteps(t.batch, row.k, t.step_ms, t.speedup) for t in row.timings]
        under_load[source] += [
            MeasuredSteps(point.concurrency, point.k, point.step_ms, point.speedup)
            for point in report.load
            if wanted(point) and (point.engine, point.k) == (row.engine, row.k)
        ]
    candidates = [*under_load.items(), *timed.items()]
    several = [(source, steps) for source, steps in candidates if len(_by_batch(steps)) > 1]
    return next((one for one in several if one[0].is_vllm), several[0] if several else (None, []))


def _by_batch(steps: Sequence[MeasuredSteps]) -> Mapping[int, list[MeasuredSteps]]:
    """Return the steps by batch size, in ascending order; each has them by ascending K."""
    by_batch: dict[int, list[MeasuredSteps]] = defaultdict(list)
    for one in sorted(steps, key=lambda one: (one.batch, one.k)):
        by_batch[one.batch].append(one)
    return by_batch


def batch_schedule(steps: Sequence[MeasuredSteps], k: int) -> tuple[tuple[int, int, int], ...]:
    """Return ranges of batch sizes with the fastest number of drafts, at most `k`; 0: none.

    A batch size between two measured ones has the drafts of the nearer one, by their ratio. The
    result is empty if fewer than two batch sizes were measured.
    """
    best: dict[int, int] = {}
    for batch, members in _by_batch(steps).items():
        speedups = {0: 1.0} | {
            one.k: one.speedup for one in members if 0 < one.k <= k and one.speedup is not None
        }
        if len(speedups) > 1:
            best[batch] = max(speedups, key=lambda drafts: speedups[drafts])
    if len(best) < 2:
        return ()
    batches = list(best)
    ends = [math.isqrt(a * b) for a, b in pairwise(batches)] + batches[-1:]
    schedule: list[tuple[int, int, int]] = []
    start = 1
    for batch, end in zip(batches, ends, strict=True):
        if schedule and schedule[-1][2] == best[batch]:
            start = schedule.pop()[0]
        schedule.append((start, end, best[batch]))
        start = end + 1
    return tuple(schedule)


def step_rates(steps: Sequence[MeasuredSteps]) -> dict[str, Any] | None:
    """Return the steps per second by the tokens that a step verifies, batch · (K + 1).

    Equal numbers of tokens have the median of their times. Steps without drafts are left out, since
    their time lacks the head's. None with fewer than two points.
    """
    times: dict[int, list[float]] = defaultdict(list)
    for one in steps:
        if one.k and one.step_ms:
            times[one.batch * (one.k + 1)].append(one.step_ms)
    if len(times) < 2:
        return None
    tokens = sorted(times)
    return {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [1e3 / median(times[n]) for n in tokens],
        "max_batch_tokens": tokens[-1],
    }
