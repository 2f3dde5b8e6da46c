"""The parts of a report that the console, the HTML page and the model card render alike.

`sections.py` makes them of a report. A renderer knows nothing about rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = "–"
"""Text for a value that was not measured or has no meaning for the row."""

WORDS = ("category", "losslessness")
"""Columns of groups that hold words."""


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        left: whether it holds words, which stand at the left; numbers stand at the right.
        room: the most characters of a line where words wrap; 0: they do not wrap.
        leaves: 0: the column always stays; if the console is narrow 1 leaves, then 2, then 3.
        meaning: explanation of the name.
    """

    name: str
    left: bool = False
    room: int = 0
    leaves: int = 0
    meaning: str = ""


class Line(NamedTuple):
    """A line of a table: `plain` decoding is paler, the `best` bolder than others."""

    cells: Sequence[str]
    style: Literal["", "plain", "best"] = ""


@dataclass(frozen=True)
class Table:
    """Lines of texts; without columns it has pairs of a name and its text.

    Attributes:
        packed: whether the pairs are so short that several fit in a line.
    """

    columns: Sequence[Column]
    lines: Sequence[Line]
    packed: bool = False


class Plot(NamedTuple):
    """A figure with the name of its PNG file, without suffix."""

    name: str
    figure: Figure


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        text: sentences, or lines of a list if there are several.
        kind: the `headline` is the report's own; `folded` details are left out in the console.
    """

    title: str
    text: Sequence[str] = ()
    table: Table | None = None
    figure: Plot | None = None
    kind: Literal["headline", "open", "warning", "folded"] = "open"


def facts(pairs: Iterable[tuple[str, str]], *, packed: bool = False) -> Table:
    """Return a table of names and texts."""
    return Table((), [Line(pair) for pair in pairs], packed)


def filled(table: Table) -> Table:
    """Return a table without the columns in which no line has a value."""
    kept = [
        i
        for i in range(len(table.columns))
        if any(line.cells[i] not in ("", NONE) for line in table.lines)
    ]
    lines = [Line([line.cells[i] for i in kept], line.style) for line in table.lines]
    return Table([table.columns[i] for i in kept], lines)


def grouped(
    first: str,
    columns: Mapping[str, Callable[[Any], str]],
    groups: Iterable[tuple[str, Iterable[Any]]],
    style: Callable[[Any], Any] = lambda _: "",
) -> Table:
    """Return a table with a line for each item of the groups.

    Args:
        first: name of the first column, which has a group's label beside its first item.
        columns: the text of an item, by the name of its column.
    """
    lines = [
        Line([label if i == 0 else "", *(text(item) for text in columns.values())], style(item))
        for label, items in groups
        for i, item in enumerate(items)
    ]
    names = [Column(name, left=name in WORDS, room=14 * (name in WORDS)) for name in columns]
    return Table([Column(first, left=True, room=14), *names], lines)
