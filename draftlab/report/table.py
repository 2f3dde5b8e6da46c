"""The report in the console: a verdict, one table, conditions, advice and the warnings last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from draftlab.evaluate.results import Report, Row, Timing
from draftlab.report import break_even, calibration
from draftlab.report import formatting as fmt
from draftlab.report.categories import CategoryTable, category_tables
from draftlab.report.conditions import condition_lines, report_conditions, warnings
from draftlab.report.formatting import NONE
from draftlab.report.load import LoadTable, load_tables
from draftlab.report.verdict import title, verdicts

_ACCEPTANCE = "acceptance\nat 1…K"
_TWO = 10
"""Characters of two positions in a line, and of the title."""
_TTFT = "TTFT\nms"


@dataclass(frozen=True)
class Column:
    """A column of the table: a cell for each row, or one for each timed batch of a row.

    Attributes:
        wraps: whether its texts wrap if the console is narrow.
        legend: name of the explanation in `fmt.LEGEND`; conditions have none.
    """

    name: str
    cell: Callable[[Row], str] | None = None
    timing_cell: Callable[[Row | Timing], str] | None = None
    wraps: bool = False
    left: bool = False
    legend: str = ""

    def text(self, row: Row, timing: Row | Timing, is_first: bool) -> str:
        """Return the text in a line; it is empty if the value does not exist."""
        text = NONE
        if self.timing_cell:
            text = self.timing_cell(timing)
        elif self.cell and is_first:
            text = self.cell(row)
        return "" if text == NONE else text


_MEASURED = (
    Column("T", lambda row: fmt.temperature(row.temperature)),
    Column("K", lambda row: str(row.k) if fmt.has_drafter(row) else "none"),
    Column("drafting", fmt.drafting, left=True, legend="drafting"),
    Column(
        "AL",
        lambda row: fmt.with_interval(row.acceptance_length, row.acceptance_length_ci),
        legend="AL",
    ),
    Column(
        _ACCEPTANCE,
        lambda row: " ".join(f"{a:.2f}" for a in row.counters.acceptance_at or []),
        wraps=True,
        left=True,
        legend="acceptance",
    ),
    Column("batch", timing_cell=lambda timing: str(timing.batch)),
    Column("TPOT\nms", timing_cell=lambda timing: fmt.milliseconds(timing.tpot_ms), legend="TPOT"),
    Column(_TTFT, timing_cell=lambda timing: fmt.milliseconds(timing.ttft_ms), legend="TTFT"),
    Column(
        "speed-up",
        timing_cell=lambda t: fmt.speedup(t.speedup, t.speedup_ci),
        legend="speed-up",
    ),
)


@dataclass(frozen=True)
class Layout:
    """How the table is made narrower.

    Attributes:
        without: columns that are left out.
        wraps: whether columns wrap that can.
        below: whether intervals stand below their values.
        conditions: most characters of a line of a condition.
    """

    without: tuple[str, ...] = ()
    wraps: bool = True
    below: bool = False
    conditions: int = 14

    def text(self, column: Column, text: str) -> str:
        """Return a cell's text, with the interval of a measured value on its own line."""
        return text.replace(" [", "\n[") if self.below and column.legend else text


LAYOUTS = (
    Layout(wraps=False),
    Layout(),
    Layout((_ACCEPTANCE,)),
    Layout((_ACCEPTANCE,), conditions=10),
    Layout((_ACCEPTANCE,), below=True),
    *(Layout((_ACCEPTANCE, _TTFT), below=True, conditions=most) for most in (14, 10, 8, 6)),
)
"""From the widest to the narrowest: the first one is used that the console has room for."""


def _columns(report: Report) -> list[Column]:
    """Return the columns of conditions that vary between rows, and those of measured values."""
    rows = report.rows
    varying = report_conditions(report).varying
    conditions: list[Column] = []
    for name, values in varying.items():
        by_row = dict(zip(map(id, rows), values, strict=True))
        if name != "drafting":  # its column is after K
            conditions.append(Column(name, lambda r, v=by_row: v[id(r)], wraps=True, left=True))
    several_batches = any(len(row.timings) > 1 for row in rows)
    shown = {"batch": several_batches, "drafting": "drafting" in varying}
    return conditions + [
        column
        for column in _MEASURED
        if shown.get(column.name, True)
        and any(column.text(*line) for row in rows for line in _lines(row))
    ]


def _lines(row: Row) -> list[tuple[Row, Row | Timing, bool]]:
    """Return the lines of a row, one for each timed batch: (row, timing, whether it is first)."""
    return [(row, timing, i == 0) for i, timing in enumerate(row.timings or [row])]


def _table(report: Report, columns: Sequence[Column], console: Console) -> Table:
    """Return the table of rows in the widest layout that the console has room for."""
    wide = console.options.update(max_width=10_000)
    for layout in LAYOUTS:
        table = _table_of(report, columns, layout)
        if Measurement.get(console, wide, table).maximum <= console.width:
            break
    return table


def _table_of(report: Report, columns: Sequence[Column], layout: Layout) -> Table:
    table = new_table()
    columns = [column for column in columns if column.name not in layout.without]
    for column in columns:
        wraps = layout.wraps and column.wraps
        table.add_column(
            column.name,
            justify="left" if column.left else "right",
            no_wrap=not wraps,
            overflow="fold",
            max_width=(_TWO if column.legend else layout.conditions) if wraps else None,
        )
    for row in report.rows:
        for line in _lines(row):
            # Text, not str: a name in square brackets must not be read as markup
            cells = [Text(layout.text(column, column.text(*line))) for column in columns]
            table.add_row(*cells, style="" if fmt.has_drafter(row) else "dim")
    return table


def _by_category(table: CategoryTable) -> Table:
    """Return the results by category as a table."""
    shown = new_table()
    shown.title, shown.title_justify = Text(f"by category: {table.title}"), "left"
    for name in table.header:
        shown.add_column(name, justify="left" if name == "category" else "right", overflow="fold")
    for cells in table.rows:
        shown.add_row(*map(Text, cells))
    return shown


def _goodput(table: LoadTable) -> Table:
    """Return the goodput by concurrency as a table; the best of a column is marked."""
    shown = new_table()
    shown.add_column(f"goodput in tokens/s, {table.title}", overflow="fold")
    for concurrency in table.concurrencies:
        shown.add_column(f"{concurrency}\nat once", justify="right", no_wrap=True)
    for name, cells in table.rows:
        texts = [Text("") if c is None else Text(f"{c.text}{' *' * c.best}") for c in cells]
        shown.add_row(Text(name), *texts)
    return shown


def new_table() -> Table:
    """Return a table without columns."""
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        header_style="bold",
    )


def key_value_grid(items: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Return a grid of names with their texts, which wrap in their own column."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style=style)
    table.add_column(overflow="fold", style=style)
    for name, text in items:
        table.add_row(Text(name), Text(text))
    return table


def print_report(report: Report, console: Console, printed: Sequence[str] = ()) -> None:
    """Print a report: verdict, table, conditions, advice, a short legend and the warnings last.

    Eighty columns are enough. Rows without a drafter show only times.

    Args:
        printed: lines that were printed before; a warning that ends one of them is left out.
    """
    if not report.rows:
        console.print("The report has no rows: nothing was evaluated.")
        return
    rows = report.rows
    console.print()
    console.print(Text(title(report), style="bold"))
    for verdict in verdicts(report):
        console.print(Text(verdict))
    columns = _columns(report)
    table = _table(report, columns, console)
    console.print(table)
    shown = {column.header for column in table.columns}
    for table in category_tables(report, headlines=True):
        console.print(_by_category(table))
    for table in load_tables(report.load):
        console.print(_goodput(table))
    shared = {"target": fmt.target_name(report)} | report_conditions(report).shared
    lines = "\n".join(condition_lines(shared, console.width - 12))
    console.print(key_value_grid([("conditions", lines)]))
    advice = [(f"advice, {name}:", text) for name, text in fmt.advice(report)]
    if items := advice + [(f"{name}:", text) for name, text in break_even.lines(report)]:
        console.print()
        console.print(key_value_grid(items, "bold"))
    if items := [(f"confidence, {name}:", text) for name, text in calibration.lines(report)]:
        console.print()
        console.print(key_value_grid(items, "bold"))
    for head, certificate in fmt.certificates(report):
        console.print()
        console.print(key_value_grid([(f"certificate, {head}:", "\n".join(certificate))], "bold"))
    console.print()
    names = {column.legend for column in columns if column.name in shown}
    names |= {"drafting"} if any(map(fmt.has_drafter, rows)) else set()
    names |= {"goodput"} if report.load else set()
    legend = {name: texts[0] for name, texts in fmt.LEGEND.items() if name in names}
    legend |= fmt.head_notes(rows)
    console.print(key_value_grid(legend.items(), style="dim"))
    texts = warnings(report)
    if new := {text: w for text, w in texts.items() if not any(p.endswith(text) for p in printed)}:
        console.print()
        console.print(key_value_grid([("warning:", text) for text in new.values()], "yellow"))
