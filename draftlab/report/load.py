"""Measurements under load as sections: goodput by configuration and concurrency, and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftlab.evaluate.results import LoadPoint
from draftlab.report import formatting as fmt
from draftlab.report.section import NONE, Column, Line, Section, Table, grouped


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
    groups: dict[str, list[LoadPoint]] = {point.configuration: [] for point in points}
    for point in sorted(points, key=lambda point: point.concurrency):
        groups[point.configuration].append(point)
    return groups


def goodput(load: Sequence[LoadPoint]) -> list[Section]:
    """Return the goodput of each engine and temperature; the best of a column has a star."""
    found = []
    for title, points in load_groups(load).items():
        columns = sorted({point.concurrency for point in points})
        best = {
            c: max((p for p in points if p.concurrency == c), key=lambda p: p.goodput_tok_s)
            for c in columns
        }
        lines = []
        for name, members in by_configuration(points).items():
            at = {p.concurrency: _goodput(p) + " *" * (best[p.concurrency] is p) for p in members}
            lines.append(Line([name, *(at.get(c, "") for c in columns)]))
        header = [Column("tokens/s", left=True, room=14)]
        header += [Column(f"{c}\nat once") for c in columns]
        text = [f"goodput: {fmt.LEGEND['goodput'][0]}"]
        found.append(Section(f"Goodput under load, {title}", text, Table(header, lines)))
    return found


def _goodput(point: LoadPoint) -> str:
    """Return "412 (1.31×)", the goodput and its ratio to plain decoding."""
    text = rate(point.goodput_tok_s)
    return text if point.speedup is None else f"{text} ({fmt.factor(point.speedup)})"


def rate(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """Return tokens per second with three digits or more, and the interval: "412 [402, 421]"."""
    if value is None:
        return NONE
    digits = 1 if value < 100 else 0
    text = f"{value:,.{digits}f}"
    if interval is None:
        return text
    return f"{text} [{interval[0]:,.{digits}f}, {interval[1]:,.{digits}f}]"


def _percentile(time: str, name: str) -> Callable[[LoadPoint], str]:
    def text(point: LoadPoint) -> str:
        values = getattr(point, time)
        if values is None:
            return NONE
        return fmt.milliseconds(getattr(values, name), getattr(values, f"{name}_ci"))

    return text


TIMES: dict[str, Callable[[LoadPoint], str]] = {
    "at once": lambda p: str(p.concurrency),
    "running": lambda p: fmt.number(p.mean_running, 1),
    "tokens / s": lambda p: rate(p.goodput_tok_s, p.goodput_tok_s_ci),
    "against no drafting": lambda p: fmt.speedup(p.speedup, p.speedup_ci),
    "per request": lambda p: rate(p.user_tok_s, p.user_tok_s_ci),
    **{
        f"{time} {name}": _percentile(f"{time.lower()}_ms", name)
        for time in ("TPOT", "TTFT")
        for name in ("p50", "p90", "p99")
    },
    "step": lambda p: fmt.milliseconds(p.step_ms),
    "AL": lambda p: fmt.number(p.acceptance_length, 2),
    "requests / tokens": lambda p: f"{fmt.count(p.requests)} / {fmt.count(p.output_tokens)}",
}
TIMES_TEXT = (
    "Milliseconds with 95 % intervals over prompts. Running: mean number of requests that ran at "
    "once. Per request: tokens per second after its first token. TTFT counts from a request's "
    "admission. Step: time between two steps of a request, prefills of others included."
)


def times_under_load(load: Sequence[LoadPoint]) -> Section:
    """Return the times of every point."""
    groups = [
        (f"{title}, {name}", members)
        for title, points in load_groups(load).items()
        for name, members in by_configuration(points).items()
    ]
    table = grouped("configuration", TIMES, groups, lambda p: "" if p.k else "plain")
    return Section("Times under load", [TIMES_TEXT], table, kind="folded")
