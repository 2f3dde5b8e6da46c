"""The results of bench_acceptance.py as a table: each head's AL, and its difference to ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from acceptance_peers import Trained

from draftlab.intervals import bootstrap_interval

OURS = "ours"
"""Name of our heads."""
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Result:
    """One trained head.

    Attributes:
        counters: by temperature, drafts and accepted drafts of each prompt, [P][2].
    """

    name: str
    family: str
    seed: int
    trained: Trained
    counters: dict[str, list[list[int]]]


def mean_al(results: Sequence[Result], temperature: str, index: Any = slice(None)) -> float:
    """Return the mean of the seeds' AL over some prompts."""
    values = []
    for result in results:
        drafts, accepted = np.array(result.counters[temperature])[index].sum(0)
        values.append(1 + accepted / drafts)
    return float(np.mean(values))


def interval_text(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


COLUMNS = (
    "head | seeds | tokens seen | steps | trained parameters | learning rate | AL, T = 0 "
    "| to ours | AL, T = 0.8 | to ours | seconds | steady | peak GiB"
)


def table(results: Sequence[Result]) -> str:
    """Return the table. Intervals are over prompts, of the mean over the seeds of both heads."""
    lines = [f"| {COLUMNS} |", "|---" * len(COLUMNS.split("|")) + "|"]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.family, result.name), []).append(result)
    for (family, name), group in groups.items():
        ours = [r for r in groups[family, OURS] if r.seed in {g.seed for g in group}]
        trained = [r.trained for r in group]
        cells = [
            f"{name}, {family}",
            " ".join(str(r.seed) for r in group),
            f"{np.mean([t.tokens_seen for t in trained]) / 1e6:.2f} M",
            f"{np.mean([t.steps for t in trained]):.0f}",
            f"{trained[0].parameters / 1e6:.2f} M",
            f"{trained[0].learning_rate:g}",
        ]
        for temperature in map(str, TEMPERATURES):
            count = len(group[0].counters[temperature])

            def difference(index: Any, temperature: str = temperature) -> float:
                return mean_al(group, temperature, index) - mean_al(ours, temperature, index)  # noqa: B023

            def own(index: Any, temperature: str = temperature) -> float:
                return mean_al(group, temperature, index)  # noqa: B023

            everything = np.arange(count)
            cells.append(interval_text(own(everything), *bootstrap_interval(own, count)))
            ends = bootstrap_interval(difference, count)
            same = name == OURS
            cells.append("" if same else interval_text(difference(everything), *ends, "+"))
        for field in ("seconds", "steady_seconds", "peak_gib"):
            cells.append(f"{np.mean([getattr(t, field) for t in trained]):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
