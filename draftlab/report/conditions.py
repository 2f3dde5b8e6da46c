"""The conditions under which rows were measured, labels of rows, and their warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.section import NONE


def _off(value: Any) -> str:
    return "off" if value is None else str(value)


def _with_drafter(get: Callable[[Row], str]) -> Callable[[Row], str | None]:
    """Return a condition that is None for rows without a drafter."""
    return lambda row: get(row) if fmt.has_drafter(row) else None


_CONDITIONS: dict[str, Callable[[Row], str | None]] = {
    "head": _with_drafter(lambda row: row.head or "unnamed"),
    "drafter": _with_drafter(lambda row: row.drafter),
    "drafting": _with_drafter(fmt.drafting),
    "verification": _with_drafter(lambda row: row.verification),
    "engine": lambda row: f"{row.engine} {row.engine_version}".strip(),
    "device": lambda row: row.device,
    "dtype": lambda row: row.dtype,
    "batch": lambda row: str(row.batch),
    "prompts": lambda row: f"{row.prompts:,}",
    "suite": lambda row: f"{row.suite} (sha256 of its tokens {row.suite_sha256[:12]})",
    "template": lambda row: fmt.short_hash(row.template),
    "max tokens": lambda row: f"{row.max_new_tokens:,}",
    "top-k": lambda row: _off(row.top_k),
    "top-p": lambda row: _off(row.top_p),
    "seed": lambda row: str(row.seed),
}


def split_conditions(rows: Sequence[Row]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the value of each condition that is the same in every row that has it, and the values
    of each other one, one per row.
    """
    shared, varying = {}, {}
    for name, get in _CONDITIONS.items():
        values = [get(row) for row in rows]
        distinct = {value for value in values if value is not None}
        if len(distinct) > 1:
            varying[name] = [NONE if value is None else value for value in values]
        elif distinct:
            shared[name] = distinct.pop()
    # The shared conditions have the whole names, with the hashes.
    short_names: tuple[Callable[[Row], str], ...] = (
        fmt.suite_name,
        lambda row: row.suite,
        lambda row: row.suite_sha256[:6],
    )
    for name in short_names if "suite" in varying else ():
        short = [name(row) for row in rows]
        if len(set(short)) == len(set(varying["suite"])):
            shared["suites"] = ", ".join(dict.fromkeys(varying["suite"]))
            varying["suite"] = short
            break
    trained = {row.head: row.k_trained for row in rows if row.k_trained is not None}
    if trained:
        several = len(set(trained.values())) > 1
        shared["trained K"] = ", ".join(
            dict.fromkeys(f"{k} ({head})" if several else f"{k}" for head, k in trained.items())
        )
    return shared, varying


def report_conditions(report: Report) -> dict[str, str]:
    """Return the target, the conditions that rows share, and those of the timing pass.

    The timing pass can differ from the counting pass: batch 1, fewer prompts, shorter answers.
    """
    found = {"target": fmt.target_name(report)} | split_conditions(report.rows)[0]
    timing = report.environment.get("timing")
    if isinstance(timing, Mapping):
        found["timed at"] = ", ".join(
            f"{name.replace('_', ' ')} {value}"
            for name, value in timing.items()
            if value is not None
        )
    return found


def row_traits(rows: Sequence[Row], *, with_k: bool = True) -> list[tuple[str, ...]]:
    """Return what distinguishes each row from the others, except its temperature."""
    _, varying = split_conditions(rows)
    several_k = with_k and len({row.k for row in rows if fmt.has_drafter(row)}) > 1
    traits = []
    for i, row in enumerate(rows):
        values = {name: column[i] for name, column in varying.items() if column[i] != NONE}
        parts = [values.pop(name) for name in ("head", "drafter") if name in values]
        parts += [f"K = {row.k}"] * (several_k and fmt.has_drafter(row))
        parts += [
            f"{value} drafts" if name == "drafting" else f"{name} {value}"
            for name, value in values.items()
        ]
        traits.append(tuple(parts))
    return traits


def row_labels(rows: Sequence[Row]) -> list[str]:
    """Return a unique label per row: its temperature and its traits."""
    labels = []
    for row, traits in zip(rows, row_traits(rows), strict=True):
        state = [] if fmt.has_drafter(row) else ["no drafting"]
        labels.append(", ".join([f"T = {row.temperature:g}", *state, *traits]))
    return [
        label if labels.count(label) == 1 else f"{label} (#{i})"
        for i, label in enumerate(labels, 1)
    ]


def description(report: Report) -> str:
    """Return target and conditions of a report's plots, which a PNG file carries as text."""
    return " · ".join(f"{name} {value}" for name, value in report_conditions(report).items())
