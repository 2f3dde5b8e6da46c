"""Comparison of chain and parallel heads at the same K, as text and tables.

The break-even is computed in `evaluate/break_even.py`. Without times only acceptance lengths are
compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt

_DRAFTERS = ("chain", "parallel")
_CONDITIONS = ("suite", "engine", "temperature", "draft_probs")
_PAIR_KEYS = (*_CONDITIONS, "chain", "parallel")


def lines(report: Report) -> list[tuple[str, str]]:
    """Return (title, text) of each pair of heads under the same conditions."""
    return [(_title(report, pair), pair["text"]) for pair in _pairs(report)]


def tables(report: Report) -> list[dict[str, Any]]:
    """Return a table per pair: title, text, whether it was timed, and a row for each K."""
    return [
        {
            "title": f"{_title(report, pair)} ({pair['engine']})",
            "text": pair["text"],
            "timed": pair["batch"] is not None,
            "rows": [_table_row(report, pair, point) for point in pair["points"]],
        }
        for pair in _pairs(report)
    ]


def _table_row(report: Report, pair: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    k = point["k"]
    return {
        "k": k,
        "first": k == pair["k"],
        "lengths": [fmt.number(point[f"{kind}_length"], 2) for kind in _DRAFTERS],
        "steps": [fmt.milliseconds(point.get(f"{kind}_step_ms")) for kind in _DRAFTERS],
        "tpots": [fmt.milliseconds(point.get(f"{kind}_tpot_ms")) for kind in _DRAFTERS],
        "ttfts": [fmt.milliseconds(_ttft_ms(report, pair, kind, k)) for kind in _DRAFTERS],
        "share": fmt.number(point["share"], 2),
        "needed": fmt.number(point.get("needed"), 2),
    }


def _pairs(report: Report) -> list[Mapping[str, Any]]:
    """Return the adviser's pairs, then those without times."""
    timed = (report.adviser or {}).get("break_even", [])
    timed_keys = {tuple(pair[key] for key in _PAIR_KEYS) for pair in timed}
    untimed = _untimed_pairs(report.rows)
    return [*timed, *(pair for key, pair in untimed.items() if key not in timed_keys)]


def _untimed_pairs(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Return every chain with every parallel head under the same conditions, by `_PAIR_KEYS`."""
    points: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    by_drafter = [[row for row in rows if row.drafter == kind and row.drafts] for kind in _DRAFTERS]
    for chain, parallel in product(*by_drafter):
        conditions = _conditions(chain)
        if chain.k == parallel.k and conditions == _conditions(parallel):
            lengths = chain.acceptance_length, parallel.acceptance_length
            points.setdefault((*conditions, chain.head, parallel.head), []).append(
                {
                    "k": chain.k,
                    "chain_length": lengths[0],
                    "parallel_length": lengths[1],
                    "share": lengths[1] / lengths[0],
                }
            )
    return {key: _untimed_pair(key, points[key]) for key in points}


def _untimed_pair(key: tuple[Any, ...], points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a pair with the fields of `evaluate.break_even.BreakEven`, without times."""
    points = sorted(points, key=lambda point: point["k"])
    first, *others = (f"{point['share']:.2f}" for point in points)
    shares = [f"{first} of the chain's AL", *others]
    text = ", ".join(f"{share} at K = {p['k']}" for share, p in zip(shares, points, strict=True))
    return dict(zip(_PAIR_KEYS, key, strict=True)) | {
        "batch": None,
        "k": None,
        "text": f"parallel has {text}; there are too few times to tell which is faster",
        "points": points,
    }


def _conditions(row: Row) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in _CONDITIONS)


def _title(report: Report, pair: Mapping[str, Any]) -> str:
    """Return "head against peagle, T = 0, batch 1", with the suite if there are several."""
    names = [f"{pair['chain']} against {pair['parallel']}"]
    if len({row.suite for row in report.rows}) > 1:
        names.append(pair["suite"].rpartition("/")[2])
    return fmt.conditions_text(pair["temperature"], pair["draft_probs"], pair["batch"], *names)


def _ttft_ms(report: Report, pair: Mapping[str, Any], kind: str, k: int) -> float | None:
    """Return the time to first token of a head of the pair; None if that K was not timed."""
    conditions = tuple(pair[name] for name in _CONDITIONS)
    for row in report.rows:
        found = row.head, row.drafter, row.k, _conditions(row)
        if found == (pair[kind], kind, k, conditions):
            for timing in row.timings:
                if timing.batch == pair["batch"]:
                    return timing.ttft_ms
    return None
