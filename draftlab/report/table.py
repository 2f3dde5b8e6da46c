"""The report in the console: tables of metrics, times and counters, then conditions and advice."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftlab.evaluate.results import Report, Row
from draftlab.report import break_even
from draftlab.report import formatting as fmt
from draftlab.report.conditions import report_conditions
from draftlab.report.formatting import NONE
from draftlab.report.verdict import verdicts

Column = tuple[str, Callable[[Row], str]]
_EXPECTED = "ex-\npected\nAL"
_ACCEPTANCE = "accep-\ntance\nat 1…K"
_OPTIONAL = (_EXPECTED, "speed-up", "TPOT ms", "TTFT\nms")


def _acceptance(row: Row) -> str:
    return " ".join(f"{a:.2f}" for a in row.counters.acceptance_at or []) or NONE


def _metric_columns(rows: list[Row]) -> list[Column]:
    columns: list[Column] = [
        ("head", lambda row: row.head or "none")
        if _has_head_column(rows)
        else ("drafter", lambda row: row.drafter),
        ("K", lambda row: str(row.k) if fmt.has_drafter(row) else NONE),
        ("T", lambda row: fmt.temperature(row.temperature)),
        ("draft\nprobs", fmt.draft_probs),
        ("AL", lambda row: fmt.with_interval(row.acceptance_length, row.acceptance_length_ci)),
        (_EXPECTED, lambda row: fmt.number(fmt.expected_length(row), 2)),
        (_ACCEPTANCE, _acceptance),
        ("speed-up", lambda row: fmt.speedup(row.speedup, row.speedup_ci)),
    ]
    if _has_head_column(rows) and fmt.has_chain_and_parallel(rows):
        columns.insert(1, ("drafter", lambda row: row.drafter))
    if len({row.engine for row in rows}) > 1:
        columns.insert(0, ("engine", lambda row: row.engine.partition(" (")[0]))
    return _measured(columns, rows)


def _measured(columns: list[Column], rows: list[Row]) -> list[Column]:
    """Return the columns without those that were not measured in any row."""
    shown = {name for name, get in columns if any(get(row) != NONE for row in rows)}
    return [column for column in columns if column[0] in shown or column[0] not in _OPTIONAL]


def _has_head_column(rows: list[Row]) -> bool:
    """Return whether the first table has a column of heads: several with short names."""
    names = {row.head for row in rows if row.head}
    return len(names) > 1 and max(map(len, names)) <= 14


def _has_expected(rows: list[Row]) -> bool:
    return any(row.expected_acceptance is not None for row in rows)


def _counter(name: str) -> Callable[[Row], str]:
    return lambda row: fmt.count(getattr(row, name)) if fmt.has_drafter(row) else NONE


def _time_and_counter_columns() -> list[Column]:
    return [
        ("TPOT ms", lambda row: fmt.milliseconds(row.tpot_ms, row.tpot_ms_ci)),
        ("TTFT\nms", lambda row: fmt.milliseconds(row.ttft_ms)),
        ("repe-\ntition", lambda row: fmt.number(row.repetition_rate, 2)),
        ("prompts", lambda row: fmt.count(row.prompts)),
        ("output\ntokens", lambda row: fmt.count(row.output_tokens)),
        ("drafts", _counter("drafts")),
        ("draft\ntokens", _counter("draft_tokens")),
        ("accepted", _counter("accepted")),
    ]


def _row_number(i: int, row: Row) -> str:
    return f"{i}{fmt.DEFAULT_MARK if fmt.is_vllm_default(row) else ' '}"


def _table(rows: list[Row], columns: list[Column]) -> Table:
    table = new_table()
    table.add_column("# ", justify="right", no_wrap=True)
    for name, _ in columns:
        left = name in ("engine", "drafter", "head", _ACCEPTANCE)
        # If the console is too narrow, the column that grows with K wraps.
        table.add_column(name, justify="left" if left else "right", no_wrap=name != _ACCEPTANCE)
    for i, row in enumerate(rows, 1):
        # Text, not str: a name in square brackets must not be read as markup
        cells = [Text(_row_number(i, row)), *(Text(get(row)) for _, get in columns)]
        table.add_row(*cells, style="" if fmt.has_drafter(row) else "dim")
    return table


def new_table() -> Table:
    """Return a table without columns."""
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        header_style="bold",
    )


def _batch_table(rows: list[Row]) -> Table:
    """Return the times at every timed batch size."""
    table = new_table()
    for name in (
        "# ", "batch", "TPOT ms", "TTFT\nms", "step\nms", "floor\nms", "tokens/s", "speed-up",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows, 1):
        for timing in row.timings:
            table.add_row(
                _row_number(i, row),
                str(timing.batch),
                fmt.milliseconds(timing.tpot_ms, timing.tpot_ms_ci),
                fmt.milliseconds(timing.ttft_ms),
                fmt.milliseconds(timing.step_ms),
                fmt.milliseconds(timing.floor_ms),
                fmt.number(timing.throughput_tok_s, 0),
                fmt.speedup(timing.speedup, timing.speedup_ci),
                style="" if fmt.has_drafter(row) else "dim",
            )
    return table


def _varying_table(rows: list[Row], varying: dict[str, list[str]]) -> Table:
    table = new_table()
    table.add_column("# ", justify="right", no_wrap=True)
    for name in varying:
        table.add_column(name, overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(
            Text(_row_number(i + 1, row)), *(Text(values[i]) for values in varying.values())
        )
    return table


def key_value_grid(items: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Return a grid of names with their texts, which wrap in their own column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style=style)
    table.add_column(overflow="fold", style=style)
    for name, text in items:
        table.add_row(Text(name), Text(text))
    return table


def print_report(report: Report, console: Console) -> None:
    """Print a report: tables, conditions, advice, a short legend and the warnings last.

    It needs 100 columns. Rows without a drafter show only times and token counts.
    """
    if not report.rows:
        console.print("The report has no rows: nothing was evaluated.")
        return
    rows, conditions = report.rows, report_conditions(report)
    varying = dict(conditions.varying)
    if _has_head_column(rows):
        varying.pop("head", None)
    console.print()
    console.print(Text(f"Target {fmt.target_name(report)}", style="bold"))
    for verdict in verdicts(report):
        console.print(Text(verdict))
    console.print(_table(rows, _metric_columns(rows)))
    console.print(_table(rows, _measured(_time_and_counter_columns(), rows)))
    if any(len(row.timings) > 1 for row in rows):
        console.print(_batch_table(rows))
    if varying:
        console.print(_varying_table(rows, varying))
    console.print(key_value_grid([("conditions", "\n".join(conditions.lines(console.width - 12)))]))
    if advice := fmt.advice(report):
        console.print()
        items = [(f"advice, {name}:", text) for name, text in advice]
        if check := fmt.advice_check(report):
            items.append(("the adviser:", check))
        console.print(key_value_grid(items, "bold"))
    if comparisons := break_even.lines(report):
        items = [(f"{title}:", text) for title, text in comparisons]
        console.print(key_value_grid(items, "bold"))
    for head, lines in fmt.certificates(report):
        console.print()
        console.print(key_value_grid([(f"certificate, {head}:", "\n".join(lines))], "bold"))
    console.print()
    legend = {name: fmt.LEGEND[name][0] for name in fmt.IN_CONSOLE}
    if not _has_expected(rows):
        del legend["expected AL"]
    if all(row.speedup is None for row in rows):
        del legend["speed-up"]
    if any(map(fmt.is_vllm_default, rows)):
        legend[fmt.DEFAULT_MARK] = fmt.DEFAULT_NOTE
    legend |= fmt.head_notes(rows)
    console.print(key_value_grid(legend.items(), style="dim"))
    if warnings := fmt.warnings(report):
        console.print()
        items = [(f"warning, {where}:", text) for where, text in warnings]
        console.print(key_value_grid(items, "yellow"))
