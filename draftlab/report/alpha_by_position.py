"""Acceptance by position in the conversation, from the head's validation in training."""

from __future__ import annotations

from typing import Any

from draftlab.evaluate.results import Report
from draftlab.report import formatting as fmt

KEY = "alpha_by_position"
"""Key in `Report.environment`: by head, the ranges of positions (`train/validation.py`)."""


def tables(report: Report) -> list[dict[str, Any]]:
    """Return for each head its name and a row of texts per range of positions with data."""
    return [
        {
            "head": head,
            "steps": max(len(one["alpha"]) for one in ranges),
            "rows": [
                {
                    "positions": " – ".join(map(fmt.count, (one["start"], one["stop"] - 1))),
                    "alpha": [fmt.number(a, 3) for a in one["alpha"]],
                    "rows": fmt.count(one["rows"][0]),
                }
                for one in ranges
                if one["rows"][0]
            ],
        }
        for head, ranges in report.environment.get(KEY, {}).items()
    ]
