"""Several reports of a target in one table: what each setting does on each suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath

from rich.console import Console
from rich.text import Text

from draftlab.errors import UserError
from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as wording
from draftlab.report.conditions import split_conditions
from draftlab.report.formatting import NONE
from draftlab.report.table import frame, grid

_Columns = dict[str, Callable[[Row], str]]

_SETTING: _Columns = {
    "head": lambda row: row.head or "none",
    "drafter": lambda row: row.drafter,
    "K": lambda row: str(row.k) if wording.drafted(row) else NONE,
    "T": lambda row: wording.temperature(row.temperature),
    "draft\nprobs": wording.draft_probs,
}
_FIGURES: _Columns = {
    "prompts": lambda row: wording.count(row.prompts),
    "AL": lambda row: wording.with_interval(row.acceptance_length, row.acceptance_length_ci),
    "TPOT\nms": lambda row: wording.milliseconds(row.tpot_ms),
    "TTFT\nms": lambda row: wording.milliseconds(row.ttft_ms),
    "speed-\nup": lambda row: wording.times(row.speedup),
}


def print_suites(reports: Sequence[Report], console: Console) -> None:
    """Prints the rows of several reports, those of a setting together, a suite beside a suite.

    Times are those of the first batch that was timed.

    Raises:
        UserError: for reports of different targets, or without rows.
    """
    targets = list(dict.fromkeys(map(wording.target_name, reports)))
    if len(targets) > 1:
        raise UserError(
            f"expected reports of one target, found {', '.join(targets)}",
            do="print them one by one",
        )
    rows = [row for report in reports for row in report.rows]
    if not rows:
        raise UserError("expected reports with rows, found none", do="evaluate again")
    settings = list(dict.fromkeys(map(_setting, rows)))
    rows.sort(key=lambda row: settings.index(_setting(row)))  # stable: suites stay in order
    columns = _SETTING | {"suite": _suite_names(rows)} | _FIGURES
    if not wording.several_drafters(rows):
        del columns["drafter"]
    table = frame()
    for name in columns:
        text = name in ("head", "drafter", "suite")
        table.add_column(
            name, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        table.add_row(
            *(Text(get(row)) for get in columns.values()),
            style="" if wording.drafted(row) else "dim",
            end_section=_setting(row) != _setting(following),
        )
    found = split_conditions(rows)
    lines = found.lines(console.width - 12)
    if differing := [name for name in found.varying if name not in ("head", "suite")]:
        lines.append(f"not alike in all rows: {', '.join(differing)}")
    console.print()
    console.print(Text(f"Target {targets[0]}", style="bold"))
    console.print(table)
    console.print(grid([("conditions", "\n".join(lines))]))


def _setting(row: Row) -> tuple[str, ...]:
    return tuple(get(row) for get in _SETTING.values())


def _suite_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """A suite's name without its folder, unless two of them would be called alike."""
    names = {row.suite: PurePath(row.suite).name for row in rows}
    alike = len(set(names.values())) < len(names)
    return lambda row: row.suite if alike else names[row.suite]
