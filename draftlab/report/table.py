"""The closing tables in the console: figures, then times and raw counters, then conditions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as wording
from draftlab.report import same_k
from draftlab.report.conditions import report_conditions
from draftlab.report.formatting import NONE

Column = tuple[str, Callable[[Row], str]]
_EXPECTED = "ex-\npected\nAL"
_ACCEPTANCE = "accep-\ntance\nat 1…K"


def _acceptance(row: Row) -> str:
    return " ".join(f"{a:.2f}" for a in row.counters.acceptance_at or []) or NONE


def _figures(rows: list[Row]) -> list[Column]:
    columns: list[Column] = [
        ("head", lambda row: row.head or "none")
        if names_heads(rows)
        else ("drafter", lambda row: row.drafter),
        ("K", lambda row: str(row.k) if wording.drafted(row) else NONE),
        ("T", lambda row: wording.temperature(row.temperature)),
        ("draft\nprobs", wording.draft_probs),
        ("AL", lambda row: wording.with_interval(row.acceptance_length, row.acceptance_length_ci)),
        (_EXPECTED, lambda row: wording.number(wording.expected_length(row), 2)),
        (_ACCEPTANCE, _acceptance),
        ("speed-up", lambda row: wording.speedup(row.speedup, row.speedup_ci)),
    ]
    if names_heads(rows) and wording.several_drafters(rows):
        columns.insert(1, ("drafter", lambda row: row.drafter))
    if len({row.engine for row in rows}) > 1:
        columns.insert(0, ("engine", lambda row: row.engine.partition(" (")[0]))
    return [c for c in columns if c[0] != _EXPECTED or _expects(rows)]


def names_heads(rows: list[Row]) -> bool:
    """Whether the first table tells heads apart: several, with names that fit a column."""
    names = {row.head for row in rows if row.head}
    return len(names) > 1 and max(map(len, names)) <= 14


def _expects(rows: list[Row]) -> bool:
    return any(row.expected_acceptance is not None for row in rows)


def _counter(name: str) -> Callable[[Row], str]:
    return lambda row: wording.count(getattr(row, name)) if wording.drafted(row) else NONE


def _times_and_counters() -> list[Column]:
    return [
        ("TPOT ms", lambda row: wording.milliseconds(row.tpot_ms, row.tpot_ms_ci)),
        ("TTFT\nms", lambda row: wording.milliseconds(row.ttft_ms)),
        ("repe-\ntition", lambda row: wording.number(row.repetition_rate, 2)),
        ("prompts", lambda row: wording.count(row.prompts)),
        ("output\ntokens", lambda row: wording.count(row.output_tokens)),
        ("drafts", _counter("drafts")),
        ("draft\ntokens", _counter("draft_tokens")),
        ("accepted", _counter("accepted")),
    ]


def _mark(i: int, row: Row) -> str:
    return f"{i}{wording.DEFAULT_MARK if wording.is_vllm_default(row) else ' '}"


def _table(rows: list[Row], columns: list[Column]) -> Table:
    table = frame()
    table.add_column("# ", justify="right", no_wrap=True)
    for name, _ in columns:
        left = name in ("engine", "drafter", "head", _ACCEPTANCE)
        # Where columns are too many for the console, the one that grows with K is broken.
        table.add_column(name, justify="left" if left else "right", no_wrap=name != _ACCEPTANCE)
    for i, row in enumerate(rows, 1):
        # Text, not str: a name in square brackets must not be read as markup
        cells = [Text(_mark(i, row)), *(Text(get(row)) for _, get in columns)]
        table.add_row(*cells, style="" if wording.drafted(row) else "dim")
    return table


def frame() -> Table:
    """A table without columns."""
    return Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        header_style="bold",
    )


def _batches(rows: list[Row]) -> Table:
    """Times at every batch that was timed."""
    table = frame()
    for name in (
        "# ", "batch", "TPOT ms", "TTFT\nms", "step\nms", "floor\nms", "tokens/s", "speed-up",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for i, row in enumerate(rows, 1):
        for timing in row.timings:
            table.add_row(
                _mark(i, row),
                str(timing.batch),
                wording.milliseconds(timing.tpot_ms, timing.tpot_ms_ci),
                wording.milliseconds(timing.ttft_ms),
                wording.milliseconds(timing.step_ms),
                wording.milliseconds(timing.floor_ms),
                wording.number(timing.throughput_tok_s, 0),
                wording.speedup(timing.speedup, timing.speedup_ci),
                style="" if wording.drafted(row) else "dim",
            )
    return table


def _varying_table(rows: list[Row], varying: dict[str, list[str]]) -> Table:
    table = frame()
    table.add_column("# ", justify="right", no_wrap=True)
    for name in varying:
        table.add_column(name, overflow="fold")
    for i, row in enumerate(rows):
        table.add_row(Text(_mark(i + 1, row)), *(Text(values[i]) for values in varying.values()))
    return table


def grid(items: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Names, and their texts wrapped beside them."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style=style)
    table.add_column(overflow="fold", style=style)
    for name, text in items:
        table.add_row(Text(name), Text(text))
    return table


def print_report(report: Report, console: Console) -> None:
    """Prints a report: two tables, conditions, advice, a short legend, warnings last.

    Readable from 100 columns on. Rows without a drafter show times and token counts only.
    """
    if not report.rows:
        console.print("The report has no rows: nothing was evaluated.")
        return
    rows, conditions = report.rows, report_conditions(report)
    varying = dict(conditions.varying)
    if names_heads(rows):
        varying.pop("head", None)
    console.print()
    console.print(Text(f"Target {wording.target_name(report)}", style="bold"))
    console.print(_table(rows, _figures(rows)))
    console.print(_table(rows, _times_and_counters()))
    if any(len(row.timings) > 1 for row in rows):
        console.print(_batches(rows))
    if varying:
        console.print(_varying_table(rows, varying))
    console.print(grid([("conditions", "\n".join(conditions.lines(console.width - 12)))]))
    if advice := wording.advice(report):
        console.print()
        items = [(f"advice, {of}:", text) for of, text in advice]
        if check := wording.advice_check(report):
            items.append(("the adviser:", check))
        console.print(grid(items, "bold"))
    if found := same_k.lines(report):
        console.print(grid([(f"{of}:", text) for of, text in found], "bold"))
    for head, lines in wording.certificates(report):
        console.print()
        console.print(grid([(f"certificate, {head}:", "\n".join(lines))], "bold"))
    console.print()
    legend = {name: wording.LEGEND[name][0] for name in wording.IN_CONSOLE}
    if not _expects(rows):
        del legend["expected AL"]
    if any(map(wording.is_vllm_default, rows)):
        legend[wording.DEFAULT_MARK] = wording.DEFAULT_NOTE
    legend |= wording.head_notes(rows)
    console.print(grid(legend.items(), style="dim"))
    if found := wording.warnings(report):
        console.print()
        console.print(grid([(f"warning, {where}:", text) for where, text in found], "yellow"))
