"""Chain and parallel heads at the same K, in words and tables (`decode/break_even.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftlab.report import wording
from draftlab.results import Report

_KINDS = ("chain", "parallel")


def lines(report: Report) -> list[tuple[str, str]]:
    """Chain against parallel, at the first temperature of each pair and batch: (of what, text)."""
    lines: dict[tuple[Any, ...], tuple[str, str]] = {}
    for one in (report.adviser or {}).get("break_even", []):
        key = (one["engine"], one["chain"], one["parallel"], one["batch"])
        lines.setdefault(key, (_compared(one), one["text"]))
    return list(lines.values())


def _compared(one: Mapping[str, Any]) -> str:
    """ "head against ptd, T = 0, batch 1"."""
    parts = [
        f"{one['chain']} against {one['parallel']}",
        f"T = {wording.temperature(one['temperature'])}",
    ]
    if one["temperature"] > 0:
        parts.append(f"draft probs {'on' if one['draft_probs'] else 'off'}")
    return ", ".join([*parts, f"batch {one['batch']}"])


def tables(report: Report) -> list[dict[str, Any]]:
    """Tables of chain and parallel heads at the same K: title, text, and a row for each K."""
    return [
        {
            "title": f"{_compared(one)} ({one['engine']})",
            "text": one["text"],
            "rows": [
                {
                    "k": p["k"],
                    "first": p["k"] == one["k"],
                    "lengths": [wording.number(p[f"{kind}_length"], 2) for kind in _KINDS],
                    "steps": [wording.milliseconds(p[f"{kind}_step_ms"]) for kind in _KINDS],
                    "tpots": [wording.milliseconds(p[f"{kind}_tpot_ms"]) for kind in _KINDS],
                    "ttfts": [
                        wording.milliseconds(_ttft_ms(report, one, kind, p["k"])) for kind in _KINDS
                    ],
                    "share": wording.number(p["share"], 2),
                    "needed": wording.number(p["needed"], 2),
                }
                for p in one["points"]
            ],
        }
        for one in (report.adviser or {}).get("break_even", [])
    ]


def _ttft_ms(report: Report, one: Mapping[str, Any], kind: str, k: int) -> float | None:
    """The time to first token of one of the two at a K; None where that K was not timed."""
    for row in report.rows:
        same = all(
            getattr(row, key) == one[key] for key in ("engine", "temperature", "draft_probs")
        )
        if same and (row.head, row.drafter, row.k) == (one[kind], kind, k):
            for timing in row.timings:
                if timing.batch == one["batch"]:
                    return timing.ttft_ms
    return None
