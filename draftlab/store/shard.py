"""The shards of a store: the table of written ones, views of their columns, and their files."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, Field

from draftlab.errors import UserError
from draftlab.store.columns import ColumnFile
from draftlab.store.record_index import RecordIndex

SHARDS = "shards.safetensors"
_LIST_THREADS = 4
"""Threads that ask for the sizes of a folder's files."""
NO_TIME = -(2**63)
"""In place of the time of a file's last change: there is no file, or it is not known."""
_FILE = re.compile(r"shard-([0-9]{5}|[1-9][0-9]{5,17})\.safetensors")


def shard_file(number: int) -> str:
    """Return the name of the file of a shard."""
    return f"shard-{number:05d}.safetensors"


def shard_number(file: str) -> int:
    """Return the number of a shard by the name of its file; −1: it is another file."""
    match = _FILE.fullmatch(file)
    return int(match[1]) if match else -1


class WrittenShard(BaseModel, extra="forbid"):
    """The fields of a shard's receipt that describe its file."""

    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    fp8_errors: list[tuple[float, float]] = []
    """For each boundary, the relative error of its features as read, and of its worst channel."""


@dataclass(frozen=True, eq=False)
class ShardTable(ColumnFile):
    """The table of the shards of a complete store (shards.safetensors), in columns.

    Attributes:
        bytes: int64 [shards], sizes of the files.
        sha256: uint8 [shards, 32], hashes of the files.
        fp8_errors: float64 [shards, boundaries, 2], for each boundary the relative error of its
            features as read, and of its worst channel; NaN: unknown. Other dtypes have no
            boundaries here.
    """

    DTYPES: ClassVar = {"bytes": np.int64, "sha256": np.uint8, "fp8_errors": np.float64}
    bytes: np.ndarray
    sha256: np.ndarray
    fp8_errors: np.ndarray

    @classmethod
    def of(cls, index: RecordIndex, boundaries: int, shards: Iterable[WrittenShard]) -> ShardTable:
        """Return the table of the shards of an index, in order; boundaries are those of an fp8
        store, 0 for other dtypes.
        """
        count = len(index.shard_records)
        sizes, hashes = np.zeros(count, np.int64), np.zeros((count, 32), np.uint8)
        errors = np.full((count, boundaries, 2), np.nan)
        for number, shard in zip(range(count), shards, strict=True):
            sizes[number] = shard.bytes
            hashes[number] = np.frombuffer(bytes.fromhex(shard.sha256), np.uint8)
            if shard.fp8_errors:
                errors[number] = shard.fp8_errors
        return cls(sizes, hashes, errors)

    def check(self, index: RecordIndex, boundaries: int) -> None:
        """Raise a `ValueError` if this is not the table of an index; boundaries: as in `of`."""
        count = len(index.shard_records)
        for column, shape in (
            (self.bytes, (count,)),
            (self.sha256, (count, 32)),
            (self.fp8_errors, (count, boundaries, 2)),
        ):
            if column.shape != shape:
                raise ValueError(f"expected columns of {count} shards, found shape {column.shape}")


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
        lengths: list[int] = self.index.lengths[self.rows].tolist()
        return lengths

    @property
    def bytes(self) -> int | None:
        """The size of its file; None until the store is complete."""
        return None if self.table is None else int(self.table.bytes[self.number])

    @property
    def sha256(self) -> str | None:
        """The hex SHA-256 of its file; None until the store is complete."""
        return None if self.table is None else self.table.sha256[self.number].tobytes().hex()

    @property
    def fp8_errors(self) -> list[tuple[float, float]]:
        """For each boundary, the errors of its features (`ShardTable`); none: unknown."""
        errors = [] if self.table is None else self.table.fp8_errors[self.number].tolist()
        return [(error, worst) for error, worst in errors if error == error]

    def written(self) -> dict[str, Any]:
        """Return the fields of `WrittenShard`, of a complete store."""
        return {name: getattr(self, name) for name in WrittenShard.model_fields}

    def path(self, folder: Path) -> Path:
        """Return the path of the file in the store's folder; raise a `UserError` if it is a
        symbolic link that leads out of the folder.
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

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        return Shard(self._index, self._table, range(len(self))[number])


def _checked(path: Path) -> Path:
    if path.is_symlink() and path.resolve().parent != path.parent.resolve():
        raise UserError(
            "expected shards in the store's folder, found a symbolic link that leads out of it",
            where=path,
            do="copy the file that it leads to into the store, if you trust it; whoever made "
            "this store chose which of your files it leads to",
        )
    return path


Listing = dict[int, tuple[int, int]]
"""Files of shards by their numbers: sizes, and times of the last change (`st_mtime_ns`)."""
NO_FILE = (-1, NO_TIME)
"""In place of an entry of a `Listing` that is not there."""


def list_shards(folder: Path) -> Listing:
    """List a folder, which may be missing; raise a `UserError` if a shard is a symbolic link out of
    it.

    Threads ask for the sizes: a network is slow.
    """
    names = os.listdir(folder) if folder.is_dir() else []
    shards = {number: name for name in names if (number := shard_number(name)) >= 0}
    with ThreadPool(_LIST_THREADS) as pool:
        states = pool.map(_file_state, [os.path.join(folder, name) for name in shards.values()])
    return {number: state for number, state in zip(shards, states, strict=True) if state}


def _file_state(path: str) -> tuple[int, int] | None:
    """Return size and time of a shard's file; None: it is none, or another process removed it."""
    try:
        state = os.stat(path, follow_symlinks=False)
        if stat.S_ISLNK(state.st_mode):
            state = _checked(Path(path)).stat()
    except FileNotFoundError:
        return None
    return (state.st_size, state.st_mtime_ns) if stat.S_ISREG(state.st_mode) else None
