"""The rows that a report's verdict and an export's K are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from draftlab.evaluate.results import Row


def speed(row: Row) -> tuple[float, float]:
    """Return what rows are compared by: the speed-up, or else the acceptance length."""
    return row.speedup or 0.0, row.acceptance_length or 0.0


def drafting_pays(interval: tuple[float, float] | None) -> bool | None:
    """Return whether a speed-up is above 1; None if its interval, as it is printed, contains 1."""
    if interval is None:
        return None
    low, high = (round(end, 2) for end in interval)
    return None if low <= 1 <= high else low > 1


def headlines(rows: Sequence[Row]) -> list[tuple[list[Row], Row]]:
    """Return the rows at the lowest temperature of each engine, head and suite, with their best.

    The best one is the fastest, or that with the largest AL if there is no speed-up. Rows without
    drafts are left out.
    """
    groups: dict[tuple[str, str | None, str], list[Row]] = {}
    for row in rows:
        if row.drafter != "none":
            groups.setdefault((row.engine, row.head, row.suite), []).append(row)
    found = []
    for members in groups.values():
        lowest = min(row.temperature for row in members)
        here = [row for row in members if row.temperature == lowest]
        found.append((here, max(here, key=speed)))
    return found


class FastestK(NamedTuple):
    """The fastest K of a head on one engine, at the lowest temperature.

    Attributes:
        speedup: over several suites the geometric mean of theirs.
        measured: number of K's that have a speed-up on every suite.
    """

    k: int
    speedup: float
    temperature: float
    engine: str
    measured: int


def fastest_k(rows: Sequence[Row]) -> FastestK | None:
    """Return the fastest measured K, on vLLM if that measured any; None without an interval.

    Args:
        rows: of one head, with drafts.
    """
    engines = sorted({row.engine for row in rows}, key=lambda name: not name.startswith("vllm"))
    for engine in engines:
        suites = headlines([row for row in rows if row.engine == engine])
        logs: dict[int, dict[str, float]] = {}
        for row in (row for here, _ in suites for row in here):
            if row.speedup and row.speedup_ci:
                best = logs.setdefault(row.k, {})
                best[row.suite] = max(best.get(row.suite, -math.inf), math.log(row.speedup))
        means = {k: sum(v.values()) / len(v) for k, v in logs.items() if len(v) == len(suites)}
        if means:
            k = max(means, key=lambda one: means[one])
            temperature = suites[0][1].temperature
            return FastestK(k, math.exp(means[k]), temperature, engine, len(means))
    return None
