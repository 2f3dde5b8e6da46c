"""One table of several reports of a target: every setting on every suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath

from rich.console import Console
from rich.text import Text

from draftlab.errors import UserError
from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.conditions import condition_lines, split_conditions
from draftlab.report.formatting import NONE
from draftlab.report.table import key_value_grid, new_table

_Columns = dict[str, Callable[[Row], str]]

_SETTINGS: _Columns = {
    "head": lambda row: row.head or "none",
    "drafter": lambda row: row.drafter,
    "K": lambda row: str(row.k) if fmt.has_drafter(row) else NONE,
    "T": lambda row: fmt.temperature(row.temperature),
    "drafting": fmt.drafting,
}
_METRICS: _Columns = {
    "prompts": lambda row: fmt.count(row.prompts),
    "AL": lambda row: fmt.with_interval(row.acceptance_length, row.acceptance_length_ci),
    "TPOT\nms": lambda row: fmt.milliseconds(row.tpot_ms),
    "TTFT\nms": lambda row: fmt.milliseconds(row.ttft_ms),
    "speed-\nup": lambda row: fmt.factor(row.speedup),
}


def print_suites(reports: Sequence[Report], console: Console) -> None:
    """Print the rows of several reports, grouped by setting, one row per suite.

    Times are those of the first timed batch.

    Raises:
        UserError: the reports have different targets or no rows.
    """
    targets = list(dict.fromkeys(map(fmt.target_name, reports)))
    if len(targets) > 1:
        raise UserError(
            f"expected reports of one target, found {', '.join(targets)}",
            do="print them one at a time",
        )
    rows = [row for report in reports for row in report.rows]
    if not rows:
        raise UserError("expected reports with rows, found none", do="evaluate again")
    settings = list(dict.fromkeys(map(_setting, rows)))
    rows.sort(key=lambda row: settings.index(_setting(row)))  # stable: suites stay in order
    columns = _SETTINGS | {"suite": _suite_names(rows)} | _METRICS
    if len({row.drafter for row in rows if fmt.has_drafter(row)}) < 2:
        del columns["drafter"]
    table = new_table()
    for name in columns:
        is_text = name in ("head", "drafter", "suite")
        table.add_column(
            name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold"
        )
    for row, following in zip(rows, [*rows[1:], rows[-1]], strict=True):
        table.add_row(
            *(Text(get(row)) for get in columns.values()),
            style="" if fmt.has_drafter(row) else "dim",
            end_section=_setting(row) != _setting(following),
        )
    conditions = split_conditions(rows)
    lines = condition_lines(conditions.shared, console.width - 12)
    columns_of = ("head", "drafter", "drafting", "suite", "prompts")
    if varying := [name for name in conditions.varying if name not in columns_of]:
        lines.append(f"different between rows: {', '.join(varying)}")
    console.print()
    console.print(Text(f"Target {targets[0]}", style="bold"))
    console.print(table)
    console.print(key_value_grid([("conditions", "\n".join(lines))]))


def _setting(row: Row) -> tuple[str, ...]:
    return tuple(get(row) for get in _SETTINGS.values())


def _suite_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return a function for a suite's name, with its folder only if two suites share a name."""
    names = {row.suite: PurePath(row.suite).name for row in rows}
    ambiguous = len(set(names.values())) < len(names)
    return lambda row: row.suite if ambiguous else names[row.suite]
