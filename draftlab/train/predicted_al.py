"""The text of an acceptance length that a validation predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftlab.formatting import count_text
from draftlab.intervals import MIN_INTERVAL_PROMPTS, prompt_interval, resample_sums
from draftlab.store.prompt_split import group_by_prompt


class Walked(NamedTuple):
    """What a record adds to an AL: accepted drafts and steps, or their expected numbers."""

    id: str
    accepted: float
    steps: float


def al_text(al: float, records: Sequence[Walked]) -> str:
    """Return an AL with its interval over prompts; of too few prompts, that it is not known."""
    records = [record for record in records if record.steps]
    prompts = group_by_prompt([record.id for record in records]) if records else np.array([], int)
    accepted, steps = (
        np.bincount(prompts, [getattr(record, name) for record in records])
        for name in ("accepted", "steps")
    )
    count = len(steps)
    sums = resample_sums(accepted, steps) if count else (np.zeros(1), np.ones(1))
    if (interval := prompt_interval(1 + sums[0] / sums[1], count)) is None:
        return f"not known: {count_text(count, 'prompt')}, an interval needs {MIN_INTERVAL_PROMPTS}"
    low, high = interval
    return f"{al:.3f} [{low:.3f}, {high:.3f}] of {count:,} prompts"
