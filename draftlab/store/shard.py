"""The shards of a store, as views of the manifest's columns, and their files."""

from __future__ import annotations

import os
import stat
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, overload

import numpy as np

from draftlab.errors import UserError
from draftlab.store.columns import Numbers
from draftlab.store.record_index import RecordIndex
from draftlab.store.shard_table import ShardTable, WrittenShard

LIST_THREADS = 4
"""Threads that ask for the sizes of a folder's files where each answer takes long."""
SLOW_ANSWER_S = 5e-5
"""Seconds of an answer from which on threads pay, as over a network. A local disk's cache answers
in 3 µs, and threads would then wait for each other at the interpreter's lock."""
NO_TIME = -(2**63)
"""In place of the time of a file's last change: there is no file, or it is not known."""
_CHUNK = 64
"""Files for which a thread asks at a time."""
_PREFIX, _SUFFIX = "shard-", ".safetensors"


def shard_file(number: int) -> str:
    """Return the name of the file of a shard."""
    return f"{_PREFIX}{number:05d}{_SUFFIX}"


def _number_of(file: str) -> int:
    """Return the number of a shard by the name of its file; −1: it is another file.

    A store may have a million shards, and a regular expression takes three times as long.
    """
    if file[:6] != _PREFIX or file[-12:] != _SUFFIX:
        return -1
    digits = file[6:-12]
    if not (digits.isascii() and digits.isdecimal() and 5 <= len(digits) <= 18):
        return -1
    return -1 if digits[0] == "0" and len(digits) > 5 else int(digits)


@dataclass(frozen=True, eq=False)
class Shard:
    """A shard: a view that reads the columns when it is asked.

    Attributes:
        index, table: of the whole store; the table is None until the store is complete.
        number: of the shard.
    """

    index: RecordIndex
    table: ShardTable | None
    number: int

    @property
    def file(self) -> str:
        """The name of its file."""
        return shard_file(self.number)

    @property
    def records(self) -> int:
        """The number of its records."""
        return int(self.index.shard_records[self.number])

    @property
    def tokens(self) -> int:
        """The number of stored positions."""
        return int(self.index.lengths[self.rows].sum(dtype=np.int64))

    @property
    def rows(self) -> slice:
        """The numbers of its records in the store."""
        stop = int(self.index.shard_ends[self.number])
        return slice(stop - self.records, stop)

    @property
    def ids(self) -> list[str]:
        """The records' ids."""
        return self.index.ids.read(self.rows)

    @property
    def lengths(self) -> list[int]:
        """The records' numbers of tokens."""
        return Numbers(self.index.lengths).read(self.rows)

    @property
    def temperatures(self) -> list[float | None]:
        """The records' sampling temperatures."""
        return Numbers(self.index.temperatures).read(self.rows)

    @property
    def batches(self) -> list[list[int]]:
        """Numbers of the shard's records that share a forward pass; none: unknown."""
        order: list[int] = self.index.pass_order[self.rows].tolist()
        ends = (np.flatnonzero(self.index.pass_ends[self.rows]) + 1).tolist()
        return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    @property
    def bytes(self) -> int | None:
        """The size of its file; None until the store is complete."""
        return None if self.table is None else int(self.table.bytes[self.number])

    @property
    def sha256(self) -> str | None:
        """The hex SHA-256 of its file; None until the store is complete."""
        return None if self.table is None else self.table.sha256[self.number].tobytes().hex()

    @property
    def not_finite(self) -> dict[str, str]:
        """Ids of records with NaN or infinity, and where."""
        if self.table is None:
            return {}
        records, rows = self.table.not_finite_records, self.rows
        own = np.flatnonzero((records >= rows.start) & (records < rows.stop)).tolist()
        return {self.index.ids[int(records[i])]: self.table.not_finite[i] for i in own}

    @property
    def fp8_errors(self) -> list[tuple[float, float]]:
        """For each boundary, the errors of its features (`ShardTable`); none: unknown."""
        errors = [] if self.table is None else self.table.fp8_errors[self.number].tolist()
        return [(error, worst) for error, worst in errors if error == error]

    def written(self) -> dict[str, Any]:
        """Return the fields of `WrittenShard`, of a complete store."""
        return {name: getattr(self, name) for name in WrittenShard.model_fields}

    def path(self, folder: Path) -> Path:
        """Return the path of the file in the store's folder.

        Raises:
            UserError: it is a symbolic link that leads out of the folder.
        """
        return _checked(folder / self.file)

    def problem(self, size: int) -> str | None:
        """Return what is wrong with the size of the file (−1: missing); None if nothing."""
        if size == self.bytes:
            return None
        if size < 0:
            return "a shard of the store is missing"
        return (
            f"expected a shard of {self.bytes} bytes, found {size}: it is truncated or belongs to "
            "another store"
        )


class Shards(Sequence[Shard]):
    """All shards of a store; each is made when it is read."""

    def __init__(self, index: RecordIndex, table: ShardTable | None) -> None:
        self._index, self._table = index, table

    def __len__(self) -> int:
        return len(self._index.shard_records)

    @overload
    def __getitem__(self, number: int) -> Shard: ...
    @overload
    def __getitem__(self, number: slice) -> list[Shard]: ...
    def __getitem__(self, number: int | slice) -> Shard | list[Shard]:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        return Shard(self._index, self._table, range(len(self))[number])

    def __iter__(self) -> Iterator[Shard]:
        return (Shard(self._index, self._table, number) for number in range(len(self)))


def _checked(path: Path) -> Path:
    if path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise UserError(
            "expected shards in the store's folder, found a symbolic link that leads out of it",
            where=path,
            do="copy the file that it leads to into the store, if you trust it; whoever made "
            "this store chose which of your files it leads to",
        )
    return path


class ShardSizes(NamedTuple):
    """The files of shards in a folder or at a URL, in any order.

    Attributes:
        numbers: int64 [m], of the shards.
        sizes: int64 [m], in bytes.
        modified_ns: int64 [m], times of the last change (`st_mtime_ns`), in nanoseconds;
            `NO_TIME` at a URL.
    """

    numbers: np.ndarray
    sizes: np.ndarray
    modified_ns: np.ndarray

    @classmethod
    def from_files(cls, files: Iterable[tuple[str, int]]) -> ShardSizes:
        """Return the shards among files with these names and sizes."""
        numbered = ((_number_of(name), size) for name, size in files)
        known = [(number, size, NO_TIME) for number, size in numbered if number >= 0]
        return cls(*np.array(known, np.int64).reshape(-1, 3).T)

    @classmethod
    def of(cls, folder: Path) -> ShardSizes:
        """List a folder once. Where answers are slow, several threads ask for the files' sizes.

        Raises:
            UserError: a shard is a symbolic link that leads out of the folder.
        """
        descriptor = os.open(folder, os.O_RDONLY)  # so that no file's whole path is looked up
        try:
            with os.scandir(descriptor) as entries:
                started = perf_counter()
                parts = [_file_columns(folder, islice(entries, _CHUNK))]
                if perf_counter() - started < SLOW_ANSWER_S * _CHUNK:
                    parts.append(_file_columns(folder, entries))
                else:
                    parts += _list_in_threads(folder, entries)
        finally:
            os.close(descriptor)
        columns = zip(*parts, strict=True)
        return cls(*(np.concatenate([np.array(p, np.int64) for p in one]) for one in columns))

    def first(self, shards: int) -> np.ndarray:
        """Return the sizes of so many first shards: int64 [shards]; −1: there is no such file."""
        return self._first(self.sizes, shards, -1)

    def first_modified_ns(self, shards: int) -> np.ndarray:
        """Return `modified_ns` of so many first shards: int64 [shards]; `NO_TIME`: no file."""
        return self._first(self.modified_ns, shards, NO_TIME)

    def _first(self, values: np.ndarray, shards: int, missing: int) -> np.ndarray:
        result, known = np.full(shards, missing, np.int64), self.numbers < shards
        result[self.numbers[known]] = values[known]
        return result


def _list_in_threads(
    folder: Path, entries: Iterator[os.DirEntry[str]]
) -> list[tuple[array[int], ...]]:
    """Have several threads take entries in turn; return the columns of each (`_file_columns`)."""
    lock = threading.Lock()

    def next_entries() -> list[os.DirEntry[str]]:
        with lock:
            return list(islice(entries, _CHUNK))

    def columns(_: int) -> tuple[array[int], ...]:
        return _file_columns(folder, chain.from_iterable(iter(next_entries, [])))

    with ThreadPoolExecutor(LIST_THREADS, "list") as pool:
        return list(pool.map(columns, range(LIST_THREADS)))


def _file_columns(folder: Path, entries: Iterable[os.DirEntry[str]]) -> tuple[array[int], ...]:
    """Return numbers, sizes and times of the shards among files, as in `ShardSizes`."""
    numbers, sizes, times = array("q"), array("q"), array("q")
    for entry in entries:
        number = _number_of(entry.name)
        if number < 0:
            continue
        try:
            state = entry.stat(follow_symlinks=False)
            if stat.S_ISLNK(state.st_mode):
                state = _checked(folder / entry.name).stat()
        except FileNotFoundError:  # another process removed it
            continue
        if stat.S_ISREG(state.st_mode):
            numbers.append(number)
            sizes.append(state.st_size)
            times.append(state.st_mtime_ns)
    return numbers, sizes, times
