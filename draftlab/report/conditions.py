"""Under which conditions rows were measured, and what tells one row from another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as wording
from draftlab.report.formatting import NONE


def _off(value: Any) -> str:
    return "off" if value is None else str(value)


def _of_head(get: Callable[[Row], str]) -> Callable[[Row], str | None]:
    """A condition that rows without a drafter do not have."""
    return lambda row: get(row) if wording.drafted(row) else None


_CONDITIONS: dict[str, Callable[[Row], str | None]] = {
    "head": _of_head(lambda row: row.head or "unnamed"),
    "draft temperature": _of_head(
        lambda row: (
            "as the target's" if row.draft_temperature is None else f"{row.draft_temperature:g}"
        )
    ),
    "engine": lambda row: f"{row.engine} {row.engine_version}".strip(),
    "device": lambda row: row.device,
    "dtype": lambda row: row.dtype,
    "batch": lambda row: str(row.batch),
    "suite": lambda row: f"{row.suite} (sha256 {row.suite_sha256[:12]})",
    "template": lambda row: wording.short_hash(row.template),
    "max tokens": lambda row: wording.count(row.max_new_tokens),
    "top-k": lambda row: _off(row.top_k),
    "top-p": lambda row: _off(row.top_p),
    "seed": lambda row: str(row.seed),
}


@dataclass(frozen=True)
class Conditions:
    """Conditions of a report's rows.

    Attributes:
        shared: name and value of those alike in every row that has them.
        varying: name of the others, with the value of each row.
    """

    shared: dict[str, str]
    varying: dict[str, list[str]]

    def lines(self, width: int) -> list[str]:
        """The shared ones in lines of at most `width` characters, broken between conditions."""
        lines: list[str] = []
        for item in (f"{name} {value}" for name, value in self.shared.items()):
            if lines and len(lines[-1]) + len(item) + 3 <= width:
                lines[-1] += f" · {item}"
            else:
                lines.append(item)
        return lines


def split_conditions(rows: Sequence[Row]) -> Conditions:
    """Splits the rows' conditions into shared and varying ones."""
    shared, varying = {}, {}
    for name, get in _CONDITIONS.items():
        values = [get(row) for row in rows]
        distinct = {value for value in values if value is not None}
        if len(distinct) > 1:
            varying[name] = [NONE if value is None else value for value in values]
        elif distinct:
            shared[name] = distinct.pop()
    trained = {row.head: row.k_trained for row in rows if row.k_trained is not None}
    if trained:
        several = len(set(trained.values())) > 1
        shared["trained K"] = ", ".join(
            dict.fromkeys(f"{k} ({head})" if several else f"{k}" for head, k in trained.items())
        )
    return Conditions(shared, varying)


def report_conditions(report: Report) -> Conditions:
    """The conditions of its rows, and of the timing pass where `environment.timing` has them.

    A timing pass may differ from the counted one: batch 1, fewer prompts, stop tokens ignored.
    """
    found = split_conditions(report.rows)
    timing = report.environment.get("timing")
    if not isinstance(timing, Mapping):
        return found
    text = ", ".join(f"{name} {value}" for name, value in timing.items() if value is not None)
    return replace(found, shared=found.shared | {"timed at": text})


def row_traits(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """What tells each row from the others, temperature and draft probabilities aside."""
    varying = split_conditions(rows).varying
    several_k = len({row.k for row in rows if wording.drafted(row)}) > 1
    both = wording.several_drafters(rows)
    found = []
    for i, row in enumerate(rows):
        parts = [row.drafter] if both and wording.drafted(row) else []
        parts += [f"K = {row.k}"] if several_k and wording.drafted(row) else []
        parts += [
            values[i] if name == "head" else f"{name} {values[i]}"
            for name, values in varying.items()
            if values[i] != NONE
        ]
        found.append(tuple(parts))
    return found


def row_labels(rows: Sequence[Row]) -> list[str]:
    """A short name of each row: temperature, draft probabilities, and its traits; no two alike."""
    names = []
    for row, parts in zip(rows, row_traits(rows), strict=True):
        probs = (
            "" if wording.draft_probs(row) == NONE else f"draft probs {wording.draft_probs(row)}"
        )
        state = probs if wording.drafted(row) else "no drafting"
        names.append(
            ", ".join(filter(None, [f"T = {wording.temperature(row.temperature)}", state, *parts]))
        )
    return [name if names.count(name) == 1 else f"{name} (#{i})" for i, name in enumerate(names, 1)]
