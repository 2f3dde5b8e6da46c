"""Public benchmarks (mt-bench, gsm8k …): read from the Hub or from a local copy.

JSON and JSON lines are parsed here, so that errors name the line. Parquet and the Hub need the
optional package `datasets`, which is imported on first use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import parse_json, read_text
from draftlab.text.data_sets import FORMATS, datasets_package

_SPLITS = ("train", "test", "validation", "dev")
# SPEED-Bench writes this into prompts that its prepare script has not filled in.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class BenchmarkLayout:
    """The columns of a benchmark's rows, and where the rows are.

    Attributes:
        column: the prompt's column: a text, or a list of texts (turns) or messages.
        id_column: the column of the rows' ids; None: rows are numbered.
        hub, config, split: the data set on the Hub.
        get: what a user does to get the benchmark if it is not on the Hub.
        subset: the default of a folder with one file per subset, as in `vllm bench`.
        max_new_tokens: the output tokens per prompt in `vllm bench`.
    """

    column: str
    id_column: str | None
    hub: str | None = None
    config: str | None = None
    split: str | None = None
    subset: str | None = None
    get: str = ""
    max_new_tokens: int = 256


BENCHMARKS = {
    "mt-bench": BenchmarkLayout("turns", "question_id", hub="philschmid/mt-bench", split="train"),
    "humaneval": BenchmarkLayout("prompt", "task_id", hub="openai/openai_humaneval", split="test"),
    "gsm8k": BenchmarkLayout("question", None, hub="openai/gsm8k", config="main", split="test"),
    "spec-bench": BenchmarkLayout(
        "turns",
        "question_id",
        get="give it as spec-bench:PATH, the question.jsonl of the Spec-Bench repository",
    ),
    "speed-bench": BenchmarkLayout(
        "messages",
        "question_id",
        subset="qualitative",
        get="give it as speed-bench:PATH, the folder that SPEED-Bench's prepare script writes",
        max_new_tokens=4096,
    ),
}
"""The layouts of the benchmarks, by name."""


@dataclass(frozen=True)
class BenchmarkSource:
    """A benchmark's rows: from a local file or folder (`path` None: the Hub), or a part of them."""

    name: str
    layout: BenchmarkLayout
    path: Path | None
    subset: str | None
    category: str | None

    def files(self) -> list[Path] | None:
        """Return the local files, sorted; None for the Hub.

        Raises:
            UserError: there are no such files, or it is ambiguous which ones are meant.
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
            if self.path.suffix not in FORMATS:
                raise UserError(
                    f"expected a file in {', '.join(FORMATS)}, found {self.path.name}",
                    where=self.path,
                    do="give a file of one of these kinds, or a folder with them",
                )
            return [self.path]
        if not self.path.is_dir():
            raise UserError(
                f"expected a file or folder of {self.name}, found neither",
                where=self.path,
                do="check the path",
            )
        files = sorted(
            file
            for file in self.path.rglob("*")
            if file.suffix in FORMATS and file.name != "dataset_infos.json" and file.is_file()
        )
        if self.subset:
            return self._choose_subset(files)
        return self._choose_split(files)

    def _choose_subset(self, files: list[Path]) -> list[Path]:
        matches = [file for file in files if file.stem == self.subset]
        if len(matches) == 1:
            return matches
        raise UserError(
            f"expected one file for the subset {self.subset}, found {len(matches)} in "
            f"{_names(files, self.path)}",
            where=self.path,
            do=f"name the subset: {self.name}:{self.path}#SUBSET",
        )

    def _choose_split(self, files: list[Path]) -> list[Path]:
        """Return the files of the layout's configuration (a subfolder) and split."""
        config, split = self.layout.config, self.layout.split
        matches = [f for f in files if config in f.relative_to(self.path).parts] or files
        named_by_split = [f for f in matches if f.stem.split("-")[0] in _SPLITS]
        if named_by_split:
            matches = [f for f in named_by_split if f.stem.split("-")[0] == split]
        if len(matches) == 1 or (matches and named_by_split):
            return matches
        expected = " ".join(filter(None, (config, split))) or "test"
        raise UserError(
            f"expected one file, or files of the split {expected} ({split or 'test'}-*), found "
            f"{_names(files, self.path)}",
            where=self.path,
            do=f"name the file: {self.name}:FILE",
        )


def parse_benchmark(source: str) -> BenchmarkSource | None:
    """Parse a benchmark's name; return None for embedded prompts and files of conversations.

    The forms are "NAME", "NAME#category", "NAME:PATH" and "NAME:PATH#category"; for a folder of
    SPEED-Bench also "NAME:PATH#subset" and "NAME:PATH#subset/category".
    """
    name = next(
        (n for n in BENCHMARKS if source == n or source.startswith((f"{n}:", f"{n}#"))), None
    )
    if name is None:
        return None
    rest = source[len(name) :]
    text, category = rest[1:] if rest.startswith(":") else "", ""
    if rest.startswith("#"):
        category = rest[1:]
    elif "#" in text and not Path(text).expanduser().exists():  # a path may contain a "#"
        text, _, category = text.rpartition("#")
    layout, path = BENCHMARKS[name], Path(text).expanduser() if text else None
    subset = layout.subset if path is not None and path.is_dir() else None
    if subset is not None and category:
        subset, _, category = category.partition("/")
    return BenchmarkSource(name, layout, path, subset, category or None)


def read_rows(source: BenchmarkSource) -> list[tuple[str, str | None, str]]:
    """Return (id, category, first turn) of every row of the source, in the data's order.

    An id is name/id or, for rows without an id, name/number (from 1). A repeated id gets the row's
    number as a suffix.

    Raises:
        UserError: a row has another layout (the error names file, line, and the expected field), no
            row has the category, or there are no rows.
    """
    layout = source.layout
    rows: dict[str, tuple[str, str | None, str]] = {}
    categories: set[str] = set()
    for number, (where, row) in enumerate(_rows(source), 1):
        category = None if row.get("category") is None else str(row["category"])
        categories |= {category} if category else set()
        if source.category is not None and category != source.category:
            continue
        row_id = row.get(layout.id_column) if layout.id_column else None
        id_ = f"{source.name}/{number if row_id is None else row_id}"
        if id_ in rows:
            id_ = f"{source.name}/{row_id}:{number}"
        rows[id_] = (id_, category, _first_turn(source, row, where))
    if not rows:
        what = "expected prompts, found no rows"
        if source.category is not None:
            what = (
                f"expected rows of the category {source.category}, found "
                f"{', '.join(sorted(categories)) or 'rows without a category'}"
            )
        raise UserError(
            what,
            where=source.path or layout.hub or source.name,
            do="check the name of the category, or the file",
        )
    return list(rows.values())


def _rows(source: BenchmarkSource) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row after its location for error messages."""
    files = source.files()
    if files is None:
        layout = source.layout
        rows = _load_dataset(
            layout.hub,
            f"give a local copy: {source.name}:PATH",
            name=layout.config,
            split=layout.split,
        )
        yield from ((f"{layout.hub}, row {n}", row) for n, row in enumerate(rows, 1))
        return
    for file in files:
        if file.suffix == ".parquet":
            rows = _load_dataset("parquet", "", data_files=str(file), split="train", streaming=True)
            yield from ((f"{file}, row {n}", row) for n, row in enumerate(rows, 1))
        else:
            yield from json_rows(file)


def _load_dataset(path: str | None, alternative: str, **options: Any) -> Iterator[Any]:
    """Yield the rows of a data set; `alternative` is what a user can do instead."""
    where = options.get("data_files", path)
    datasets = datasets_package(where, alternative)
    try:
        yield from datasets.load_dataset(path, **options)
    except Exception as error:  # many libraries are involved: the network, the Hub, Arrow …
        raise UserError(
            f"expected a data set that loads, found {type(error).__name__}: {error}",
            where=where,
            do=alternative,
        ) from error


def _first_turn(source: BenchmarkSource, row: dict[str, Any], where: str) -> str:
    column = source.layout.column
    if column not in row:
        raise UserError(
            f"expected the field {column} of {source.name}, found {', '.join(row) or 'no field'}",
            where=where,
            do="check that the file is the benchmark that its name says",
        )
    turn = row[column]
    if isinstance(turn, list) and turn:
        turn = turn[0]
    if isinstance(turn, dict):
        turn = turn.get("content")
    if not isinstance(turn, str) or not turn.strip():
        raise UserError(
            f"expected a text, turns or messages in {column}, found {str(row[column])[:60]!r}",
            where=where,
            do="correct the row, or remove it",
        )
    if _PLACEHOLDER in turn:
        raise UserError(
            "expected a prepared prompt, found SPEED-Bench's placeholder",
            where=where,
            do="fill in the prompts with SPEED-Bench's own prepare script first",
        )
    return turn


def _names(files: list[Path], folder: Path) -> str:
    names = [str(file.relative_to(folder)) for file in files[:8]]
    return ", ".join(names) + (", …" if len(files) > 8 else "") or "no such file"


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
