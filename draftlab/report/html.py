"""The report as one HTML page that opens offline, with its plots as PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.files import atomic_path, write_text
from draftlab.report import break_even, verdict
from draftlab.report import formatting as fmt
from draftlab.report.conditions import report_conditions, row_labels
from draftlab.report.formatting import NONE

PLOT_TEXTS = {
    "acceptance_length": "Acceptance length by temperature with 95 % intervals over prompts. At "
    "T = 0 draft probabilities make no difference, so its row belongs to every line.",
    "acceptance_by_position": "Acceptance at each draft position, unconditional: the share of "
    "drafts accepted up to it, at the largest K. Dashed: without draft probabilities. Crosses: "
    "expected acceptance.",
    "tpot_by_k": "Milliseconds per output token by the number of drafts. Points were measured, "
    "with 95 % intervals over prompts; lines are the adviser's prediction. Grey: without drafting.",
    "speedup_by_batch": "Speed-up over decoding without drafts by the number of prompts decoded at "
    "once, with 95 % intervals over prompts. Below 1 drafting costs time.",
    "tpot": "Milliseconds per output token after the first, with 95 % intervals over prompts. "
    "Grey: the same prompts without drafting.",
}


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


def _interval(interval: tuple[float, float] | None, digits: int) -> str:
    """Return "[2.20, 2.43]", or an empty string."""
    return (
        ""
        if interval is None
        else f"[{fmt.number(interval[0], digits)}, {fmt.number(interval[1], digits)}]"
    )


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


def _views(rows: Sequence[Row], *, several_heads: bool) -> list[dict[str, Any]]:
    """Return the rows with their labels; with several heads the drafter column names the head."""
    with_drafter = fmt.has_chain_and_parallel(rows)
    views = []
    for number, (row, label) in enumerate(zip(rows, row_labels(rows), strict=True), 1):
        has_drafter, drafter = fmt.has_drafter(row), row.drafter
        if several_heads:
            drafter = row.head or "none"
            if with_drafter and has_drafter:
                drafter = f"{row.head} ({row.drafter})"
        views.append(
            {
                "i": number,
                "label": label,
                "row": row,
                "drafted": has_drafter,
                "mark": fmt.DEFAULT_MARK if fmt.is_vllm_default(row) else "",
                "drafter": drafter,
                "draft_probs": fmt.draft_probs(row),
                "expected_al": fmt.expected_length(row),
                "self_check": _self_check(row),
                "lossless": _lossless(row),
                "positions": _positions(row) if has_drafter else [],
            }
        )
    return views


_FILTERS = {
    "number": fmt.number,
    "integer": fmt.count,
    "ms": fmt.milliseconds,
    "factor": fmt.factor,
    "interval": _interval,
    "temperature": fmt.temperature,
}


def render_html(report: Report, pngs: Mapping[str, bytes]) -> str:
    """Return the page.

    Args:
        report: the report.
        pngs: plots by the names of `PLOT_TEXTS`. The page embeds them and needs no other file.

    Returns:
        HTML whose only external reference is the link to report.json beside it.
    """
    from jinja2 import Environment, StrictUndefined

    rows = report.rows
    own_sections = ("certificates", "alpha_by_position")
    environment_facts = {k: v for k, v in report.environment.items() if k not in own_sections}
    conditions = report_conditions(report)
    # autoescape: names and warnings come from other people's files
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= _FILTERS
    template = files("draftlab.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    several_heads = len({row.head for row in rows if row.head}) > 1
    views = _views(rows, several_heads=several_heads)
    facts = {"Target": report.target, "Environment": environment_facts}
    return environment.from_string(template).render(
        title=verdict.title(report),
        verdicts=verdict.verdicts(report),
        rows=views,
        drafted=[view for view in views if view["drafted"]],
        most_positions=max((row.k for row in rows if fmt.has_drafter(row)), default=0),
        timed=any(row.tpot_ms is not None for row in rows),
        expects=any(row.expected_acceptance is not None for row in rows),
        default_mark=fmt.DEFAULT_MARK,
        default_note=fmt.DEFAULT_NOTE,
        head_notes=fmt.head_notes(rows),
        shared=conditions.shared,
        # the other tables name the heads
        varying={k: v for k, v in conditions.varying.items() if k != "head"},
        legend=fmt.LEGEND,
        drafter_column="head" if several_heads else "drafter",
        advice=(report.adviser or {}).get("advice", []),
        conditions_text=fmt.conditions_text,
        dash=NONE,
        advice_check=fmt.advice_check(report),
        break_even=break_even.tables(report),
        alpha_by_position=report.environment.get("alpha_by_position", {}),
        certificates=fmt.certificates(report),
        warnings=fmt.warnings(report),
        plots=[
            (name, PLOT_TEXTS[name], base64.b64encode(data).decode("ascii"))
            for name, data in pngs.items()
        ],
        facts=[(title, flatten(value)) for title, value in facts.items() if value],
        schema=report.schema_version,
    )


def write_html(report: Report, folder: Path) -> Path:
    """Write report.html and a PNG file per plot into `folder`, each atomically.

    The page links to report.json beside it, which is written too if it is missing.

    Returns:
        The path of report.html.
    """
    from draftlab.report import (  # matplotlib: half a second that the console does not need
        canvas,
        plots,
    )

    pngs = {name: canvas.png(figure) for name, figure in plots.figures(report).items()}
    for name, data in pngs.items():
        with atomic_path(folder / f"{name}.png") as temporary:
            temporary.write_bytes(data)
    if not (folder / "report.json").exists():
        report.write(folder / "report.json")
    page = folder / "report.html"
    write_text(page, render_html(report, pngs))
    return page
