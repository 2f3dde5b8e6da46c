"""Public benchmarks: where their prompts are, and how their rows are read.

Of each conversation the first turn is read only, as in `vllm bench`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.text.chat_rows import Dropped, read_row
from draftlab.text.data_sets import FORMATS, Source, rows_of

# SPEED-Bench writes this into prompts that its prepare script has not filled in.
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Benchmark:
    """The columns of a benchmark's rows, and where the rows are.

    Attributes:
        column: the prompt's column, which `chat_rows.py` reads.
        id_column: the column of the rows' ids; None: rows are numbered.
        hub: the data set on the Hub.
        get: what a user does to get the benchmark if it is not on the Hub.
        subset: the file that is read of a folder with one file per subset, as in `vllm bench`.
        max_new_tokens: the output tokens per prompt in `vllm bench`.
        path: a local file or folder of the rows; None: the Hub.
    """

    name: str
    column: str
    id_column: str | None
    hub: Source | None = None
    subset: str | None = None
    get: str = ""
    max_new_tokens: int = 256
    path: Path | None = None

    def file(self) -> Path | None:
        """Return the local file; None for the Hub.

        Raises:
            UserError: there is no such file, or it is ambiguous which one is meant.
        """
        if self.path is None:
            if self.hub is None:
                raise UserError(
                    f"expected a path for {self.name}, found none", where=self.name, do=self.get
                )
            return None
        if self.path.is_file():
            if self.path.suffix not in FORMATS:
                raise UserError(
                    f"expected a file in {', '.join(FORMATS)}, found {self.path.name}",
                    where=self.path,
                    do="give a file of one of these kinds, or a folder with them",
                )
            return self.path
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
        matches = [file for file in files if self.subset in (None, file.stem)]
        if len(matches) == 1:
            return matches[0]
        names = ", ".join(str(file.relative_to(self.path)) for file in files[:8])
        raise UserError(
            f"expected one file {self.subset or ''}".rstrip()
            + f", found {len(matches)} in {names or 'no such file'}"
            + ", …" * (len(files) > 8),
            where=self.path,
            do=f"name the file: {self.name}:FILE",
        )


BENCHMARKS = {
    one.name: one
    for one in (
        Benchmark("mt-bench", "turns", "question_id", Source("mt-bench", "philschmid/mt-bench")),
        Benchmark(
            "humaneval", "prompt", "task_id", Source("humaneval", "openai/openai_humaneval", "test")
        ),
        Benchmark("gsm8k", "question", None, Source("gsm8k", "openai/gsm8k", "test", "main")),
        Benchmark(
            "spec-bench",
            "turns",
            "question_id",
            get="give it as spec-bench:PATH, the question.jsonl of the Spec-Bench repository",
        ),
        Benchmark(
            "speed-bench",
            "messages",
            "question_id",
            subset="qualitative",
            get="give it as speed-bench:PATH, the folder that SPEED-Bench's prepare script writes",
            max_new_tokens=4096,
        ),
    )
}
"""The benchmarks by name."""


def parse_benchmark(source: str) -> Benchmark | None:
    """Parse "NAME" or "NAME:PATH"; return None for embedded prompts and files of conversations."""
    name, _, path = source.partition(":")
    if name not in BENCHMARKS:
        return None
    return replace(BENCHMARKS[name], path=Path(path).expanduser() if path else None)


def read_rows(source: Benchmark) -> list[tuple[str, str | None, str]]:
    """Return (id, category, first turn) of every row of the source, in the data's order.

    An id is name/id or, for rows without an id, name/number (from 1). A repeated id gets the row's
    number as a suffix.

    Raises:
        UserError: a row has another layout (the error names file, line, and the expected field), or
            there are no rows.
    """
    rows: dict[str, tuple[str, str | None, str]] = {}
    for number, (where, row) in enumerate(_rows(source), 1):
        category = None if row.get("category") is None else str(row["category"])
        row_id = row.get(source.id_column) if source.id_column else None
        id_ = f"{source.name}/{number if row_id is None else row_id}"
        if id_ in rows:
            id_ = f"{source.name}/{row_id}:{number}"
        rows[id_] = (id_, category, _first_turn(source, row, where))
    if not rows:
        raise UserError(
            "expected prompts, found no rows",
            where=source.path or (source.hub.path if source.hub else source.name),
            do="check the file",
        )
    return list(rows.values())


def _rows(source: Benchmark) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row after its location for error messages."""
    file = source.file()
    if file is None:
        one, alternative = source.hub, f"give a local copy: {source.name}:PATH"
    else:
        one, alternative = Source(source.name, str(file)), ""
    for number, row in enumerate(rows_of(one, alternative), 1):
        where = f"{one.path}:{number}"
        if isinstance(row, dict):
            yield where, row
        elif not isinstance(row, bytes) or row.strip():
            found = f"{row[:60]!r}" if isinstance(row, bytes) else type(row).__name__
            raise UserError(
                f"expected a JSON object a row, found {found}",
                where=where,
                do="correct the row, or remove it",
            )


def _first_turn(source: Benchmark, row: dict[str, Any], where: str) -> str:
    column = source.column
    if column not in row:
        raise UserError(
            f"expected the field {column} of {source.name}, found {', '.join(row) or 'no field'}",
            where=where,
            do="check that the file is the benchmark that its name says",
        )
    try:
        messages, _ = read_row({column: row[column]})
    except Dropped as reason:
        raise UserError(
            f"expected a text, turns or messages in {column}, found {reason}",
            where=where,
            do="correct the row, or remove it",
        ) from None
    turn: str = next(message["content"] for message in messages if message["role"] == "user")
    if _PLACEHOLDER in turn:
        raise UserError(
            "expected a prepared prompt, found SPEED-Bench's placeholder",
            where=where,
            do="fill in the prompts with SPEED-Bench's own prepare script first",
        )
    return turn
