"""Readers of the files that servers read, written from the formats' facts (servers §13).

They raise ValueError where the server refuses a file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path


def read_sts(path: Path, gamma: int) -> list[float]:
    """Return SGLang's temperatures of the slots of a block with `gamma` drafts."""
    fields = json.loads(path.read_text())
    types = {"temperatures": list, "dataset": str, "num_samples": int, "ece_before": list,
             "ece_after": list}  # fmt: skip
    for name, kind in types.items():
        if name in fields and not isinstance(fields[name], kind):
            raise ValueError(f"{name} is no {kind.__name__}")
    for name in ("temperatures", "ece_before", "ece_after"):
        if not all(isinstance(value, int | float) for value in fields.get(name, [])):
            raise ValueError(f"{name} has other values than numbers")
    temperatures = fields["temperatures"]
    if not temperatures or min(temperatures) <= 0:
        raise ValueError("temperatures must be above 0")
    if len(temperatures) != gamma:
        raise ValueError("a temperature for each draft of the block is needed")
    return temperatures


def drafts_by_batch(entries: object, num_speculative_tokens: int, largest: int) -> list[int]:
    """Return vLLM's drafts for the batch sizes 1 … `largest` from a schedule.

    Ranges are inclusive, positive, ascending and without overlap; the first starts at 1. A gap and
    the sizes after the last range have the drafts of the range before.
    """
    if not isinstance(entries, list) or not entries:
        raise ValueError("a schedule is a list with at least one entry")
    ranges = []
    for entry in entries:
        if not isinstance(entry, list) or len(entry) != 3:
            raise ValueError("an entry is (first, last, drafts)")
        first, last, drafts = entry
        if not all(type(value) is int for value in entry) or not 0 < first <= last or drafts < 0:
            raise ValueError(f"a wrong entry: {entry}")
        ranges.append((first, last, drafts))
    ranges.sort()
    if ranges[0][0] != 1 or any(b[0] <= a[1] for a, b in pairwise(ranges)):
        raise ValueError("ranges start at 1 and do not overlap")
    firsts = [first for first, _, _ in ranges]
    return [
        min(ranges[bisect_right(firsts, size) - 1][2], num_speculative_tokens)
        for size in range(1, largest + 1)
    ]
