"""α by position in the conversation, as training validated each head (`train/validation.py`)."""

from __future__ import annotations

from typing import Any

from draftlab.evaluate.results import Report
from draftlab.report import formatting as wording

KEY = "alpha_by_position"
"""Of `Report.environment`: for each head by name its validation's stretches of positions."""


def tables(report: Report) -> list[dict[str, Any]]:
    """For each head its name and a row of texts for each stretch; stretches without rows aside."""
    return [
        {
            "head": head,
            "steps": max(len(one["alpha"]) for one in stretches),
            "rows": [
                {
                    "positions": " – ".join(map(wording.count, (one["start"], one["stop"] - 1))),
                    "alpha": [wording.number(a, 3) for a in one["alpha"]],
                    "rows": wording.count(one["rows"][0]),
                }
                for one in stretches
                if one["rows"][0]
            ],
        }
        for head, stretches in report.environment.get(KEY, {}).items()
    ]
