"""The results of a row by the categories of its suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from draftlab.evaluate.headline import headlines as headlines_of
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
    labels = dict(zip(map(id, report.rows), row_labels(report.rows), strict=True))
    rows = [row for _, row in headlines_of(report.rows)] if headlines else report.rows
    return [_table(labels[id(row)], row) for row in rows if row.categories]


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
