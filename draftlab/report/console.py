"""The sections of a report in a console; eighty columns are enough."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from draftlab.report.section import Section, Table

STYLES = {"": "", "plain": "dim", "best": "bold"}


class Layout(NamedTuple):
    """How a table is made narrower.

    Attributes:
        gone: columns that leave at this step or before are left out.
        room: most characters of a line of words; None: they do not wrap.
        below: whether brackets stand below their numbers.
    """

    gone: int = 0
    room: int | None = None
    below: bool = False


LAYOUTS = (
    Layout(),
    Layout(1),
    Layout(1, 24),
    Layout(2, 24),
    Layout(2, 24, below=True),
    Layout(2, 14, below=True),
    Layout(2, 12, below=True),
    Layout(3, 24, below=True),
)
"""From the widest to the narrowest: the first one is used that the console has room for.

Of the last one's words the longest wrap until it fits."""


def print_sections(sections: Iterable[Section], console: Console) -> None:
    """Print the sections that are not folded."""
    for section in sections:
        if section.kind == "folded" or section.figure:
            continue
        console.print()
        # Text, not str: a name in square brackets must not be read as markup
        style = "yellow" if section.kind == "warning" else ""
        console.print(Text(section.title, style=f"bold {style}".strip()))
        if section.table and section.table.columns:
            print_table(section.table, console)
        elif section.table and section.table.packed:
            for line in _packed([" ".join(one.cells) for one in section.table.lines], console):
                console.print(Text(line))
        elif section.table:
            console.print(_pairs(line.cells for line in section.table.lines))
        if section.kind != "headline" and len(section.text) > 1:
            console.print(_pairs((("-", text) for text in section.text), style))
        else:
            for text in section.text:
                console.print(Text(text, style=style))


def _packed(items: Sequence[str], console: Console) -> list[str]:
    """Return the items in lines of the console's width."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 3 <= console.width:
            lines[-1] += f" · {item}"
        else:
            lines.append(item)
    return lines


def _pairs(pairs: Iterable[Sequence[str]], style: str = "") -> RichTable:
    """Return a grid of names with their texts, which wrap in their own column."""
    grid = RichTable.grid(padding=(0, 2))
    grid.add_column(overflow="fold", style=style, max_width=34)
    grid.add_column(overflow="fold", style=style)
    for name, text in pairs:
        grid.add_row(Text(name), Text(text))
    return grid


def print_table(table: Table, console: Console, whole: str = "report.html") -> None:
    """Print a table in the widest layout that fits, and what its columns mean.

    Args:
        whole: where the columns are that the console has no room for.
    """
    wide = console.options.update(max_width=10_000)
    for layout in LAYOUTS:
        shown = _laid_out(table, layout)
        if Measurement.get(console, wide, shown).maximum <= console.width:
            break
    console.print(shown)
    headers = {column.header for column in shown.columns}
    meanings = [
        (one.name.partition("\n")[0], one.meaning)
        for one in table.columns
        if one.meaning and one.name in headers
    ]
    if meanings:
        console.print(_pairs(meanings, "dim"))
    gone = [" ".join(one.name.split()) for one in table.columns if one.name not in headers]
    if gone:
        width = f"the console's {console.width} columns"
        console.print(Text(f"{width} lack room for: {', '.join(gone)} ({whole})", style="dim"))


def _laid_out(table: Table, layout: Layout) -> RichTable:
    shown = RichTable(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
        header_style="bold",
    )
    kept = [i for i, one in enumerate(table.columns) if not 0 < one.leaves <= layout.gone]
    for column in (table.columns[i] for i in kept):
        wraps = bool(column.room and layout.room)
        shown.add_column(
            column.name,
            justify="left" if column.left else "right",
            no_wrap=not wraps,
            overflow="fold",
            max_width=min(column.room, layout.room or 0) if wraps else None,
        )
    for line in table.lines:
        cells = [line.cells[i] for i in kept]
        if layout.below:
            cells = [
                text if table.columns[i].left else re.sub(r" (?=[\[(])", "\n", text)
                for i, text in zip(kept, cells, strict=True)
            ]
        shown.add_row(*map(Text, cells), style=STYLES[line.style])
    return shown
