"""The report as one HTML page that opens offline, and its plots as PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.files import atomic_path, write_text
from draftlab.report import by_position, same_k
from draftlab.report import formatting as wording
from draftlab.report.conditions import report_conditions, row_labels
from draftlab.report.formatting import NONE

PLOT_TEXTS = {
    "acceptance_length": "Acceptance length by temperature with 95 % intervals over prompts. At "
    "T = 0 draft probabilities play no part, so its row belongs to every line.",
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
    """Nested mappings as (dotted name, text) in their own order; lists stay on one line."""
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
    return f"{wording.count(numerator)} / {wording.count(denominator)}"


def _positions(row: Row) -> list[dict[str, str]]:
    """Acceptance at each position with the counters that make it."""
    counters = row.counters
    expected = row.expected_acceptance or [None] * row.k
    reached = [row.drafts, *row.accepted_at[:-1]]
    return [
        {
            "share": wording.number(share, 3),
            "raw": _ratio(accepted, row.drafts),
            "conditional": wording.number(conditional, 3),
            "conditional_raw": _ratio(accepted, before),
            "expected": wording.number(expect, 3),
            "z": wording.number(z, 1),
        }
        for share, accepted, conditional, before, expect, z in zip(
            counters.acceptance_at or [None] * row.k,
            row.accepted_at,
            counters.conditional_acceptance_at,
            reached,
            expected,
            row.self_check.z if row.self_check else [None] * row.k,
            strict=True,
        )
    ]


def _self_check(row: Row) -> str:
    """ "passed" or "FAILED"; nothing where it was not made."""
    if row.self_check is None:
        return NONE
    verdict = "passed" if row.self_check.passed else "FAILED"
    if all(z is None for z in row.self_check.z):  # T = 0: nothing is drawn, so nothing is tested
        return f"{verdict}, accepted {'=' if row.self_check.passed else '≠'} expected"
    return f"{verdict}, p = {row.self_check.p_value:.2g}"


def _timings(row: Row) -> list[dict[str, str]]:
    """Times at each batch; one line without a batch where there are none."""
    found = row.timings or [row]
    return [
        {
            "batch": str(one.batch) if row.timings else NONE,
            "tpot": wording.milliseconds(one.tpot_ms),
            "tpot_ci": _interval(one.tpot_ms_ci, wording.TIME_DIGITS),
            "baseline": wording.milliseconds(one.baseline_tpot_ms),
            "speedup": wording.times(one.speedup),
            "speedup_ci": _interval(one.speedup_ci, 2),
            "ttft": wording.milliseconds(one.ttft_ms),
            "step": wording.milliseconds(one.step_ms),
            "floor": wording.milliseconds(one.floor_ms),
            "throughput": wording.number(one.throughput_tok_s, 1),
        }
        for one in found
    ]


def _on(value: bool) -> str:
    return "on" if value else "off"


def _advice(report: Report) -> list[dict[str, Any]]:
    """The adviser's tables."""
    return [
        {
            "title": ", ".join(
                [
                    f"{one['head']} ({one['engine']})",
                    f"T = {wording.temperature(one['temperature'])}",
                    *([f"draft probs {_on(one['draft_probs'])}"] if one["temperature"] else []),
                    f"batch {one['batch']}",
                ]
            ),
            "text": one["text"],
            "plain": wording.milliseconds(one["plain_ms"]),
            "rows": [
                {
                    "k": p["k"],
                    "best": p["k"] == one["best_k"],
                    "al": wording.number(p["acceptance_length"], 2),
                    "step": wording.milliseconds(p["step_ms"]),
                    "tpot": wording.milliseconds(p["tpot_ms"]),
                    "speedup": wording.times(p["speedup"]),
                    "measured": wording.times(p["measured_speedup"]),
                    "error": NONE if p["error"] is None else f"{100 * p['error']:+.1f} %",
                }
                for p in one["predictions"]
            ],
        }
        for one in (report.adviser or {}).get("advice", [])
    ]


def _lossless(row: Row) -> str:
    if row.lossless is None:
        return NONE
    p_value = "" if row.lossless.p_value is None else f", p = {row.lossless.p_value:.3g}"
    return (
        f"{row.lossless.level}: {row.lossless.test}{p_value}, n = {wording.count(row.lossless.n)}"
    )


def _view(i: int, row: Row, label: str, *, heads: bool, kinds: bool) -> dict[str, Any]:
    """A row's texts, as the template prints them.

    `heads`: several are compared. `kinds`: chains and parallel heads.
    """
    drafted = wording.drafted(row)
    name = f"{row.head} ({row.drafter})" if kinds and drafted else row.head or "none"
    return {
        "i": i,
        "label": label,
        "drafted": drafted,
        "mark": wording.DEFAULT_MARK if wording.is_vllm_default(row) else "",
        "drafter": name if heads else row.drafter,
        "k": str(row.k) if drafted else NONE,
        "temperature": wording.temperature(row.temperature),
        "draft_probs": wording.draft_probs(row),
        "al": wording.number(row.acceptance_length, 3),
        "al_ci": _interval(row.acceptance_length_ci, 3),
        "al_raw": f"1 + {_ratio(row.accepted, row.drafts)}" if drafted else "",
        "expected_al": wording.number(wording.expected_length(row), 3),
        "speedup": wording.times(row.speedup),
        "speedup_ci": _interval(row.speedup_ci, 2),
        "speedup_raw": ""
        if row.speedup is None
        else f"{wording.milliseconds(row.baseline_tpot_ms)} / {wording.milliseconds(row.tpot_ms)}",
        "tpot": wording.milliseconds(row.tpot_ms),
        "tpot_ci": _interval(row.tpot_ms_ci, wording.TIME_DIGITS),
        "ttft": wording.milliseconds(row.ttft_ms),
        "timings": _timings(row),
        "self_check": _self_check(row),
        "repetition": wording.number(row.repetition_rate, 3),
        "prompts_equal": wording.number(row.prompts_equal, 3),
        "lossless": _lossless(row),
        "prompts": wording.count(row.prompts),
        "output_tokens": wording.count(row.output_tokens),
        "drafts": wording.count(row.drafts) if drafted else NONE,
        "draft_tokens": wording.count(row.draft_tokens) if drafted else NONE,
        "accepted": wording.count(row.accepted) if drafted else NONE,
        "undrafted": wording.count(row.undrafted_steps),
        "truncated": wording.count(row.truncated_tokens),
        "positions": _positions(row) if drafted else [],
    }


def _interval(interval: tuple[float, float] | None, digits: int) -> str:
    """ "[2.20, 2.43]", or nothing."""
    return (
        "" if interval is None else wording.with_interval(0.0, interval, digits).partition(" ")[2]
    )


def render_html(report: Report, pngs: Mapping[str, bytes]) -> str:
    """The page's text.

    Args:
        report: the report.
        pngs: plots by the names of `PLOT_TEXTS`; embedded, so that the page needs no other file.

    Returns:
        HTML without any outside reference but the link to report.json beside it.
    """
    from jinja2 import Environment, StrictUndefined

    rows = report.rows
    apart = ("certificates", by_position.KEY)  # sections of their own
    environment_facts = {k: v for k, v in report.environment.items() if k not in apart}
    conditions = report_conditions(report)
    # autoescape: names and warnings come from other people's files
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = files("draftlab.report").joinpath("report.html.jinja").read_text(encoding="utf-8")
    heads = len({row.head for row in rows if row.head}) > 1
    views = [
        _view(i, row, label, heads=heads, kinds=wording.several_drafters(rows))
        for i, (row, label) in enumerate(zip(rows, row_labels(rows), strict=True), 1)
    ]
    return environment.from_string(text).render(
        target=wording.target_name(report),
        rows=views,
        drafted=[view for view in views if view["drafted"]],
        most_positions=max((row.k for row in rows if wording.drafted(row)), default=0),
        timed=any(row.tpot_ms is not None for row in rows),
        expects=any(row.expected_acceptance is not None for row in rows),
        default_mark=wording.DEFAULT_MARK,
        default_note=wording.DEFAULT_NOTE,
        head_notes=wording.head_notes(rows),
        shared=conditions.shared,
        # every other table names the heads already
        varying={k: v for k, v in conditions.varying.items() if k != "head"},
        legend=wording.LEGEND,
        drafter_column="head" if heads else "drafter",
        advice=_advice(report),
        advice_check=wording.advice_check(report),
        same_k=same_k.tables(report),
        by_position=by_position.tables(report),
        certificates=wording.certificates(report),
        warnings=wording.warnings(report),
        plots=[
            (name, PLOT_TEXTS[name], base64.b64encode(data).decode("ascii"))
            for name, data in pngs.items()
        ],
        facts=[
            (title, flatten(value))
            for title, value in (
                ("Target", report.target),
                ("Environment", environment_facts),
            )
            if value
        ],
        schema=report.schema_version,
    )


def write_html(report: Report, folder: Path) -> Path:
    """Writes report.html and one PNG file a plot into `folder`, atomically each.

    The page links to report.json beside it, which is written too where it is missing.

    Returns:
        The path of report.html.
    """
    from draftlab.report import plots  # matplotlib: half a second that the console does not need

    pngs = {name: plots.png(figure) for name, figure in plots.figures(report).items()}
    for name, data in pngs.items():
        with atomic_path(folder / f"{name}.png") as temporary:
            temporary.write_bytes(data)
    if not (folder / "report.json").exists():
        report.write(folder / "report.json")
    page = folder / "report.html"
    write_text(page, render_html(report, pngs))
    return page
