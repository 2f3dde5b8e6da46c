"""Measurements under load as tables: goodput by configuration and concurrency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftlab.evaluate.results import LoadPoint, Percentiles
from draftlab.report import formatting as fmt
from draftlab.report.formatting import NONE


@dataclass(frozen=True)
class LoadCell:
    """The goodput of a configuration at one concurrency, as text, and whether it is the best."""

    text: str
    best: bool


@dataclass(frozen=True)
class LoadTable:
    """The goodput of one engine at one temperature.

    Attributes:
        title: "T = 0", with the engine if the report has several.
        concurrencies: one for each column.
        rows: each configuration with a cell for each concurrency; None where it was not measured.
    """

    title: str
    concurrencies: list[int]
    rows: list[tuple[str, list[LoadCell | None]]]


def load_groups(load: Sequence[LoadPoint]) -> dict[str, list[LoadPoint]]:
    """Return the points of each engine and temperature, by a title."""
    engines = {point.engine for point in load}
    groups: dict[str, list[LoadPoint]] = {}
    for point in load:
        title = f"T = {fmt.temperature(point.temperature)}"
        title += f", {point.engine}" * (len(engines) > 1)
        groups.setdefault(title, []).append(point)
    return groups


def by_configuration(points: Sequence[LoadPoint]) -> dict[str, list[LoadPoint]]:
    """Return the points of each configuration, by concurrency."""
    groups: dict[str, list[LoadPoint]] = {}
    for point in sorted(points, key=lambda point: point.concurrency):
        groups.setdefault(point.configuration, []).append(point)
    order = dict.fromkeys(point.configuration for point in points)
    return {name: groups[name] for name in order}


def load_tables(load: Sequence[LoadPoint]) -> list[LoadTable]:
    """Return a table for each engine and temperature."""
    return [_table(title, points) for title, points in load_groups(load).items()]


def _table(title: str, points: Sequence[LoadPoint]) -> LoadTable:
    columns = sorted({point.concurrency for point in points})
    best = {
        c: max((p for p in points if p.concurrency == c), key=lambda p: p.goodput_tok_s)
        for c in columns
    }
    rows = []
    for name, members in by_configuration(points).items():
        at = {point.concurrency: point for point in members}
        cells = [LoadCell(_text(at[c]), at[c] is best[c]) if c in at else None for c in columns]
        rows.append((name, cells))
    return LoadTable(title, columns, rows)


def _text(point: LoadPoint) -> str:
    """Return "412 (1.31×)", the goodput and its ratio to plain decoding."""
    goodput = rate(point.goodput_tok_s)
    return goodput if point.speedup is None else f"{goodput} ({fmt.factor(point.speedup)})"


def rate(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """Return tokens per second with three digits or more, and the interval: "412 [402, 421]"."""
    if value is None:
        return NONE
    digits = 1 if value < 100 else 0
    text = f"{value:,.{digits}f}"
    if interval is None:
        return text
    return f"{text} [{interval[0]:,.{digits}f}, {interval[1]:,.{digits}f}]"


def percentiles(values: Percentiles | None) -> list[str]:
    """Return the texts of a time's percentiles, each with its interval."""
    if values is None:
        return [NONE] * 3
    names = ("p50", "p90", "p99")
    return [fmt.milliseconds(getattr(values, n), getattr(values, f"{n}_ci")) for n in names]


def load_details(load: Sequence[LoadPoint]) -> list[dict[str, Any]]:
    """Return the texts of every point for the page's folded table, by engine and temperature."""
    return [
        {"title": title, "points": [_details(point) for point in points]}
        for title, points in load_groups(load).items()
    ]


def _details(point: LoadPoint) -> dict[str, Any]:
    return {
        "configuration": point.configuration,
        "plain": point.speedup is None,
        "texts": [
            str(point.concurrency),
            fmt.number(point.mean_running, 1),
            rate(point.goodput_tok_s, point.goodput_tok_s_ci),
            fmt.speedup(point.speedup, point.speedup_ci),
            rate(point.user_tok_s, point.user_tok_s_ci),
            *percentiles(point.tpot_ms),
            *percentiles(point.ttft_ms),
            fmt.milliseconds(point.step_ms),
            fmt.number(point.acceptance_length, 2),
            f"{fmt.count(point.requests)} / {fmt.count(point.output_tokens)}",
        ],
    }
