"""Rows of public benchmarks: from the Hub, or from a local copy of the same layout.

JSON and JSON lines are read here, with line numbers in errors; Parquet and the Hub go through
`datasets`, an extra that is imported when it is needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")
_SPLITS = ("train", "test", "validation", "dev")
# SPEED-Bench's own words in prompts that its prepare script has not filled in.
_UNPREPARED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Layout:
    """How a benchmark's rows look, and where they are.

    Attributes:
        column: holds the prompt: a text, a list of texts (turns) or of messages.
        id_column: names a row; None: rows are numbered.
        hub, config, split: on the Hub. get: what to do where it is not there.
        subset: of a folder with a file a subset, the one `vllm bench` takes.
        max_new_tokens: what `vllm bench` lets each prompt have.
    """

    column: str
    id_column: str | None
    hub: str | None = None
    config: str | None = None
    split: str | None = None
    subset: str | None = None
    get: str = ""
    max_new_tokens: int = 256


@dataclass(frozen=True)
class Source:
    """A benchmark as asked for: its layout, a local file or folder (None: the Hub), and a part."""

    name: str
    layout: Layout
    path: Path | None
    subset: str | None
    category: str | None

    def files(self) -> list[Path] | None:
        """The local files, sorted; None for the Hub.

        Raises:
            UserError: nothing there, or files of which it is not clear which are meant.
        """
        if self.path is None:
            if self.layout.hub is None:
                raise UserError(
                    f"expected a path for {self.name}, found none",
                    where=self.name,
                    do=self.layout.get,
                )
            return None
        if self.path.is_file():
            if self.path.suffix not in SUFFIXES:
                raise UserError(
                    f"expected a file in {', '.join(SUFFIXES)}, found {self.path.name}",
                    where=self.path,
                )
            return [self.path]
        if not self.path.is_dir():
            raise UserError(
                f"expected a file or folder of {self.name}, found neither", where=self.path
            )
        found = sorted(
            file
            for file in self.path.rglob("*")
            if file.suffix in SUFFIXES and file.name != "dataset_infos.json" and file.is_file()
        )
        return self._subset_file(found) if self.subset else self._split_files(self.path, found)

    def _subset_file(self, found: list[Path]) -> list[Path]:
        chosen = [file for file in found if file.stem == self.subset]
        if len(chosen) != 1:
            raise UserError(
                f"expected one file for the subset {self.subset}, found {len(chosen)} beside "
                f"{_names(found, self.path)}",
                where=self.path,
                do=f"name the subset: {self.name}:{self.path}#SUBSET",
            )
        return chosen

    def _split_files(self, folder: Path, found: list[Path]) -> list[Path]:
        """Of a data set's folder: its configuration's subfolder, its split's files."""
        chosen = [f for f in found if self.layout.config in f.relative_to(folder).parts] or found
        by_split = [f for f in chosen if f.stem.split("-")[0] in _SPLITS]
        if by_split:
            chosen = [f for f in by_split if f.stem.split("-")[0] == self.layout.split]
        if not chosen or (not by_split and len(chosen) > 1):
            wanted = " ".join(filter(None, (self.layout.config, self.layout.split)))
            raise UserError(
                f"expected one file, or files of the split {wanted or 'asked for'} "
                f"({self.layout.split or 'test'}-*), found {_names(found, self.path)}",
                where=self.path,
                do=f"name the file: {self.name}:FILE",
            )
        return chosen


def read_rows(source: Source) -> list[tuple[str, str | None, str]]:
    """(id, category, first turn) of every row asked for, in the data's order.

    Ids are name/id, where rows have one that no row before had, else name/number from 1.

    Raises:
        UserError: rows of another layout (file, line, the field expected and those found), a
            category that no row has, or no rows.
    """
    layout = source.layout
    taken: dict[str, tuple[str, str | None, str]] = {}
    categories: set[str] = set()
    for number, (where, row) in enumerate(_rows(source), 1):
        category = row.get("category")
        category = None if category is None else str(category)
        categories |= {category} if category else set()
        if source.category is not None and category != source.category:
            continue
        own = row.get(layout.id_column) if layout.id_column else None
        id_ = f"{source.name}/{number if own is None else own}"
        if id_ in taken:
            id_ = f"{source.name}/{own}:{number}"
        taken[id_] = (id_, category, _first_turn(source, row, where))
    where = source.path or layout.hub or source.name
    if not taken and source.category is not None:
        raise UserError(
            f"expected rows of the category {source.category}, found "
            f"{', '.join(sorted(categories)) or 'rows without a category'}",
            where=where,
        )
    if not taken:
        raise UserError("expected prompts, found no rows", where=where)
    return list(taken.values())


def _rows(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    files = source.files()
    if files is None:
        layout = source.layout
        rows = _through_datasets(
            layout.hub,
            f"give a local copy: {source.name}:PATH",
            name=layout.config,
            split=layout.split,
        )
        yield from ((f"{layout.hub}, row {n}", row) for n, row in enumerate(rows, 1))
        return
    for file in files:
        if file.suffix == ".parquet":
            rows = _through_datasets(
                "parquet", "", data_files=str(file), split="train", streaming=True
            )
            yield from ((f"{file}, row {n}", row) for n, row in enumerate(rows, 1))
        else:
            yield from _json_rows(file)


def _through_datasets(what: str | None, otherwise: str, **options: Any) -> Iterator[Any]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            "expected the package datasets, found none",
            where=options.get("data_files", what),
            do="; or ".join(filter(None, ("pip install 'draftlab[suites]'", otherwise))),
        ) from None
    try:
        yield from datasets.load_dataset(what, **options)
    except Exception as error:  # of the network, the Hub, Arrow …: the reason is all we can pass on
        raise UserError(
            f"expected a data set that loads, found {type(error).__name__}: {error}",
            where=options.get("data_files", what),
            do=otherwise,
        ) from error


def _json_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of JSON lines, or of one JSON list."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"expected JSON in UTF-8, found: {error}", where=file) from None
    if text.lstrip().startswith("["):
        places = [(f"{file}, item {n}", row) for n, row in enumerate(_parse(text, str(file)), 1)]
    else:
        lines = ((f"{file}:{n}", line) for n, line in enumerate(text.split("\n"), 1))
        places = [(where, _parse(line, where)) for where, line in lines if line.strip()]
    for where, row in places:
        if not isinstance(row, dict):
            raise UserError(
                f"expected a JSON object a row, found {type(row).__name__}", where=where
            )
        yield where, row


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"expected JSON, found {text[:60]!r}: {error}", where=where) from None


def _first_turn(source: Source, row: dict[str, Any], where: str) -> str:
    column = source.layout.column
    if column not in row:
        raise UserError(
            f"expected the field {column} of {source.name}, found {', '.join(row) or 'no field'}",
            where=where,
        )
    found = value = row[column]
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("content")
    if not isinstance(value, str) or not value.strip():
        raise UserError(
            f"expected a text, turns or messages in {column}, found {str(found)[:60]!r}",
            where=where,
        )
    if _UNPREPARED in value:
        raise UserError(
            "expected a prepared prompt, found SPEED-Bench's placeholder",
            where=where,
            do="fill in the prompts with SPEED-Bench's own prepare script first",
        )
    return value


def _names(files: list[Path], folder: Path | None) -> str:
    shown = [str(f.relative_to(folder) if folder else f) for f in files[:8]]
    return ", ".join(shown) + (", …" if len(files) > 8 else "") or "no such file"
