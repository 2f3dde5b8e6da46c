"""The results of a row by the categories of its suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftlab.evaluate.headline import headline_rows
from draftlab.evaluate.results import Report, Row
from draftlab.report import formatting as fmt
from draftlab.report.conditions import row_labels


class CategoryTable(NamedTuple):
    """A table with the texts of its cells."""

    title: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def category_tables(report: Report, *, headlines: bool = False) -> list[CategoryTable]:
    """Return a table for each row whose suite has categories.

    Args:
        headlines: only for the rows that the verdict is about.
    """
    drafted = [row for row in report.rows if fmt.has_drafter(row)]
    labels = dict(zip(map(id, report.rows), row_labels(report.rows), strict=True))
    if headlines:
        groups: dict[tuple[str | None, str], list[Row]] = {}
        for row in drafted:
            groups.setdefault((row.head, row.suite), []).append(row)
        best = [headline_rows(rows)[1] for rows in groups.values()]
        drafted = [row for row in drafted if any(_same(row, one) for one in best)]
    return [_table(labels[id(row)], row) for row in drafted if row.categories]


def _same(row: Row, other: Row) -> bool:
    keys = ("engine", "head", "suite", "temperature", "draft_probs", "k")
    return all(getattr(row, key) == getattr(other, key) for key in keys)


def _table(label: str, row: Row) -> CategoryTable:
    timed = any(one.speedup is not None for one in row.categories)
    rows: Sequence[tuple[str, ...]] = [
        (
            one.category,
            fmt.count(one.prompts),
            fmt.with_interval(one.acceptance_length, one.acceptance_length_ci),
            fmt.speedup(one.speedup, one.speedup_ci),
        )
        for one in row.categories
    ]
    header = ("category", "prompts", "AL", "speed-up")
    width = len(header) if timed else len(header) - 1
    title = f"{label}, K = {row.k}" if "K = " not in label else label
    return CategoryTable(title, header[:width], [cells[:width] for cells in rows])
