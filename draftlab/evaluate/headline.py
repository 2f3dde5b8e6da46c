"""The rows that a report's verdict and an export's K are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence

from draftlab.evaluate.results import Row


def speed(row: Row) -> tuple[float, float]:
    """Return what rows are compared by: the speed-up, or else the acceptance length."""
    return row.speedup or 0.0, row.acceptance_length or 0.0


def headline_rows(rows: Sequence[Row]) -> tuple[list[Row], Row]:
    """Return the rows at the lowest temperature, and the one that the verdict is about.

    It is the fastest, or that with the largest AL if there is no speed-up.

    Args:
        rows: of one head on one suite, with drafts; at least one.
    """
    lowest = min(row.temperature for row in rows)
    here = [row for row in rows if row.temperature == lowest]
    return here, max(here, key=speed)


def fastest_k(rows: Sequence[Row]) -> tuple[int, float, float] | None:
    """Return the fastest measured K at the lowest temperature, its speed-up and the temperature.

    Over several suites it is the geometric mean of their speed-ups. None: no speed-up with an
    interval was measured.

    Args:
        rows: of one head, with drafts.
    """
    by_suite: dict[str, list[Row]] = {}
    for row in rows:
        by_suite.setdefault(row.suite, []).append(row)
    logs: dict[int, dict[str, float]] = {}
    temperature = 0.0
    for suite, members in by_suite.items():
        here, headline = headline_rows(members)
        temperature = headline.temperature
        for row in here:
            if row.speedup and row.speedup_ci:
                best = logs.setdefault(row.k, {})
                best[suite] = max(best.get(suite, -math.inf), math.log(row.speedup))
    means = {k: sum(v.values()) / len(v) for k, v in logs.items() if len(v) == len(by_suite)}
    if not means:
        return None
    k = max(means, key=lambda one: means[one])
    return k, math.exp(means[k]), temperature
