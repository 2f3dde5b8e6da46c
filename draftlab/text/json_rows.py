"""Rows of a file of JSON lines, or of one JSON list."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import parse_json, read_text


def json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of JSON lines, or of one JSON list, each after its location."""
    try:
        text = read_text(file, kind="JSON file")
    except UnicodeDecodeError as error:
        raise UserError(
            f"expected JSON in UTF-8, found: {error}", where=file, do="save the file in UTF-8"
        ) from None
    if text.lstrip().startswith("["):
        rows = [(f"{file}, item {n}", row) for n, row in enumerate(_parse(text, str(file)), 1)]
    else:
        lines = ((f"{file}:{n}", line) for n, line in enumerate(text.split("\n"), 1))
        rows = [(where, _parse(line, where)) for where, line in lines if line.strip()]
    for where, row in rows:
        if not isinstance(row, dict):
            raise UserError(
                f"expected a JSON object a row, found {type(row).__name__}",
                where=where,
                do="correct the row, or remove it",
            )
        yield where, row


def _parse(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(
            f"expected JSON, found {text[:60]!r}: {error}",
            where=where,
            do="correct the line, or remove it",
        ) from None
