"""The report as one HTML page that opens offline, with its plots as PNG files beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftlab.evaluate.headline import speed
from draftlab.evaluate.results import Report, Row
from draftlab.files import atomic_path, write_text
from draftlab.report import break_even, calibration, verdict
from draftlab.report import formatting as fmt
from draftlab.report.categories import category_tables
from draftlab.report.conditions import report_conditions, row_labels, warnings
from draftlab.report.formatting import NONE
from draftlab.report.load import load_details, load_tables

MAX_CARDS = 8  # more would push the table, which has the same figures, off the first screen


def flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return nested mappings as (dotted name, text) in their order; a list is one text."""
    if isinstance(value, Mapping):
        return [
            pair
            for key, item in value.items()
            for pair in flatten(item, f"{name}.{key}" if name else str(key))
        ]
    if isinstance(value, list | tuple):
        return [(name, ", ".join(map(str, value)))]
    return [(name, NONE if value is None else str(value))]


def _ratio(numerator: int, denominator: int) -> str:
    return f"{fmt.count(numerator)} / {fmt.count(denominator)}"


def _interval(interval: tuple[float, float] | None) -> str:
    """Return "[2.20, 2.43]", or an empty string."""
    return "" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def _unbroken(text: str) -> str:
    """Return the text with spaces at which no line breaks inside of "K = 4" and "[2.20, 2.43]"."""
    return re.sub(r" = |(?<=\d), (?=\d)", lambda match: match[0].replace(" ", "\xa0"), text)


def _positions(row: Row) -> list[dict[str, str]]:
    """Return the acceptance at each position with its counters."""
    counters = row.counters
    missing = [None] * row.k
    columns = zip(
        counters.acceptance_at or missing,
        row.accepted_at,
        counters.conditional_acceptance_at,
        [row.drafts, *row.accepted_at[:-1]],
        row.expected_acceptance or missing,
        row.self_check.z if row.self_check else missing,
        strict=True,
    )
    return [
        {
            "share": fmt.number(share, 3),
            "raw": _ratio(accepted, row.drafts),
            "conditional": fmt.number(conditional, 3),
            "conditional_raw": _ratio(accepted, accepted_before),
            "expected": fmt.number(expected, 3),
            "z": fmt.number(z, 1),
        }
        for share, accepted, conditional, accepted_before, expected, z in columns
    ]


def _self_check(row: Row) -> str:
    """Return "self-check passed" or "FAILED" with the p-value; `NONE` without a self-check."""
    if row.self_check is None:
        return NONE
    verdict = "passed" if row.self_check.passed else "FAILED"
    if all(z is None for z in row.self_check.z):  # T = 0: the counts must be equal
        return f"bookkeeping {verdict}, accepted {'=' if row.self_check.passed else '≠'} expected"
    return f"self-check {verdict}, p = {row.self_check.p_value:.2g}"


def _lossless(row: Row) -> str:
    if row.lossless is None:
        return NONE
    p_value = "" if row.lossless.p_value is None else f", p = {row.lossless.p_value:.3g}"
    return f"{row.lossless.level}: {row.lossless.test}{p_value}, n = {fmt.count(row.lossless.n)}"


def _views(rows: Sequence[Row], varying: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Return each row with its label and the texts that its cells show."""
    return [
        {
            "label": label,
            "row": row,
            "drafted": fmt.has_drafter(row),
            "conditions": ["" if values[i] == NONE else values[i] for values in varying.values()],
            "self_check": _self_check(row),
            "lossless": _lossless(row),
            "positions": _positions(row) if fmt.has_drafter(row) else [],
        }
        for i, (row, label) in enumerate(zip(rows, row_labels(rows), strict=True))
    ]


def _cards(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """Return the fastest K of each head, temperature and kind of drafting, with its label.

    The result is empty if there are more than `MAX_CARDS`.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.acceptance_length is not None:
            key = (row.suite, row.engine, row.head, row.temperature, fmt.drafting(row))
            groups.setdefault(key, []).append(row)
    if len(groups) > MAX_CARDS:
        return []
    fastest = [max(group, key=speed) for group in groups.values()]
    return list(zip(row_labels(fastest, without=("K",)), fastest, strict=True))


_FILTERS = {
    "number": fmt.number,
    "integer": fmt.count,
    "ms": fmt.milliseconds,
    "factor": fmt.factor,
    "interval": _interval,
    "temperature": fmt.temperature,
    "unbroken": _unbroken,
}


def render_html(report: Report, images: Sequence[tuple[str, bytes]]) -> str:
    """Return the page.

    Args:
        report: the report.
        images: the text and the PNG of each plot. The page embeds them and needs no other file.

    Returns:
        HTML whose only external reference is the link to report.json beside it.
    """
    from jinja2 import Environment, StrictUndefined

    rows = report.rows
    own_sections = ("certificates", "heads", "alpha_by_position", "timing")
    environment_facts = {k: v for k, v in report.environment.items() if k not in own_sections}
    conditions = report_conditions(report)
    # autoescape: names and warnings come from other people's files
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    template = files("draftlab.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    views = _views(rows, conditions.varying)
    facts = {"Target": report.target, "Environment": environment_facts}
    return environment.from_string(template).render(
        title=verdict.title(report),
        verdicts=verdict.verdicts(report),
        cards=_cards(rows),
        rows=views,
        category_tables=category_tables(report),
        drafted=[view for view in views if view["drafted"]],
        most_positions=max((row.k for row in rows if fmt.has_drafter(row)), default=0),
        timed=any(row.tpot_ms is not None for row in rows),
        expects=any(row.expected_acceptance is not None for row in rows),
        head_notes=fmt.head_notes(rows),
        shared={"target": fmt.target_name(report)} | conditions.shared,
        varying=conditions.varying,
        legend=fmt.LEGEND,
        advice=(report.adviser or {}).get("advice", []),
        load_advice=(report.adviser or {}).get("load", []),
        load_check=(report.adviser or {}).get("check", {}).get("text", ""),
        conditions_text=fmt.conditions_text,
        several_suites=len({row.suite for row in rows}) > 1,
        dash=NONE,
        advice_check=fmt.advice_check(report),
        break_even=break_even.tables(report),
        calibrations=calibration.tables(report),
        alpha_by_position=report.environment.get("alpha_by_position", {}),
        certificates=fmt.certificates(report),
        load_tables=load_tables(report.load),
        load_details=load_details(report.load),
        warnings=warnings(report).values(),
        plots=[(text, base64.b64encode(data).decode("ascii")) for text, data in images],
        facts=[(title, flatten(value)) for title, value in facts.items() if value],
        schema=report.schema_version,
    )


def write_plots(report: Report, folder: Path) -> dict[Path, tuple[str, bytes]]:
    """Write a PNG file per plot into `folder`; return the text and the PNG of each by its path."""
    from draftlab.report import (  # matplotlib: half a second that the console does not need
        canvas,
        plots,
    )

    description, images = plots.description(report), {}
    for plot in plots.plots(report):
        path, data = folder / f"{plot.name}.png", canvas.png(plot.figure, description)
        images[path] = (plot.text, data)
        with atomic_path(path) as temporary:
            temporary.write_bytes(data)
    return images


def is_plot(path: Path) -> bool:
    """Return whether a PNG file has the name of a plot."""
    from draftlab.report.plots import PLOTS

    return path.stem.rstrip("_0123456789") in PLOTS


def write_html(report: Report, folder: Path) -> Path:
    """Write report.html and a PNG file per plot into `folder`, each atomically.

    The page links to report.json beside it, which is written too if it is missing. Plots of an
    earlier report that this one does not have are deleted.

    Returns:
        The path of report.html.
    """
    images = write_plots(report, folder)
    for old in folder.glob("*.png"):  # of an earlier report with other rows
        if old not in images and is_plot(old):
            old.unlink()
    if not (folder / "report.json").exists():
        report.write(folder / "report.json")
    page = folder / "report.html"
    write_text(page, render_html(report, list(images.values())))
    return page
