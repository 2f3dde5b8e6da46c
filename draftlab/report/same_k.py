"""Chain and parallel heads at the same K, in words and tables (`evaluate/break_even.py`).

Without times there is no break-even; acceptance lengths are compared all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as wording

_KINDS = ("chain", "parallel")
_PAIR = ("engine", "chain", "parallel", "temperature", "draft_probs")


def lines(report: Report) -> list[tuple[str, str]]:
    """Chain against parallel, at the first temperature of each pair and batch: (of what, text)."""
    lines: dict[tuple[Any, ...], tuple[str, str]] = {}
    for one in _pairs(report):
        key = (one["engine"], one["chain"], one["parallel"], one["batch"])
        lines.setdefault(key, (_compared(one), one["text"]))
    return list(lines.values())


def tables(report: Report) -> list[dict[str, Any]]:
    """Tables of chain and parallel heads at the same K: title, text, and a row for each K.

    `timed`: whether steps and what follows from them are known.
    """
    return [
        {
            "title": f"{_compared(one)} ({one['engine']})",
            "text": one["text"],
            "timed": one["batch"] is not None,
            "rows": [
                {
                    "k": p["k"],
                    "first": p["k"] == one["k"],
                    "lengths": [wording.number(p[f"{kind}_length"], 2) for kind in _KINDS],
                    "steps": [wording.milliseconds(p.get(f"{kind}_step_ms")) for kind in _KINDS],
                    "tpots": [wording.milliseconds(p.get(f"{kind}_tpot_ms")) for kind in _KINDS],
                    "ttfts": [
                        wording.milliseconds(_ttft_ms(report, one, kind, p["k"])) for kind in _KINDS
                    ],
                    "share": wording.number(p["share"], 2),
                    "needed": wording.number(p.get("needed"), 2),
                }
                for p in one["points"]
            ],
        }
        for one in _pairs(report)
    ]


def _pairs(report: Report) -> list[Mapping[str, Any]]:
    """The adviser's, then those it could not compare for want of times."""
    timed = (report.adviser or {}).get("break_even", [])
    known = {tuple(one[key] for key in _PAIR) for one in timed}
    untimed = _lengths(report.rows)
    return [*timed, *(_told(pair, untimed[pair]) for pair in untimed if pair not in known)]


def _lengths(rows: Sequence[Row]) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Of every chain beside every parallel head, by what `_PAIR` names: the K's of both."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    kinds = [[row for row in rows if row.drafter == kind and row.drafts] for kind in _KINDS]
    for chain, parallel in product(*kinds):
        alike = [(r.engine, r.temperature, r.draft_probs, r.k) for r in (chain, parallel)]
        if alike[0] == alike[1]:
            engine, temperature, draft_probs, k = alike[0]
            pair = (engine, chain.head, parallel.head, temperature, draft_probs)
            one, other = (r.counters.acceptance_length for r in (chain, parallel))
            point = {"k": k, "chain_length": one, "parallel_length": other, "share": other / one}
            found.setdefault(pair, []).append(point)
    return found


def _told(pair: tuple[Any, ...], points: list[dict[str, Any]]) -> dict[str, Any]:
    """As the adviser tells a pair, without times."""
    points = sorted(points, key=lambda p: p["k"])
    first, *others = [f"{p['share']:.2f}" for p in points]
    told = [f"{first} of the chain's AL", *others]
    shares = ", ".join(f"{text} at K = {p['k']}" for text, p in zip(told, points, strict=True))
    text = f"parallel has {shares}; too little was timed to say which is faster"
    return dict(zip(_PAIR, pair, strict=True)) | {
        "batch": None,
        "k": None,
        "text": text,
        "points": points,
    }


def _compared(one: Mapping[str, Any]) -> str:
    """ "head against ptd, T = 0, batch 1"."""
    parts = [
        f"{one['chain']} against {one['parallel']}",
        f"T = {wording.temperature(one['temperature'])}",
    ]
    if one["temperature"] > 0:
        parts.append(f"draft probs {'on' if one['draft_probs'] else 'off'}")
    if one["batch"] is not None:
        parts.append(f"batch {one['batch']}")
    return ", ".join(parts)


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
