"""The index of a store's records (records.safetensors): ids, lengths, temperatures and passes.

It is mapped into memory, so that the processes that read a store share one copy of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeVar, overload

import numpy as np
from safetensors.numpy import save

T = TypeVar("T")
RECORDS = "records.safetensors"
_CHUNK = 65_536
_DTYPES = {
    "id_bytes": np.uint8,
    "id_ends": np.int64,
    "lengths": np.int64,
    "temperatures": np.float64,
    "pass_order": np.int32,
    "pass_ends": np.uint8,
}
_NAMES = {np.uint8: "U8", np.int32: "I32", np.int64: "I64", np.float64: "F64"}


class Column(Sequence[T]):
    """A read-only column of the index.

    Args:
        read: returns the values of a slice of records.
        size: number of records.
    """

    def __init__(self, read: Callable[[slice], list[T]], size: int) -> None:
        self._read, self._size = read, size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._size)
            return self._read(slice(start, stop))[::step] if step > 0 else list(self)[index]
        index = range(self._size)[index]
        return self._read(slice(index, index + 1))[0]

    def __iter__(self) -> Iterator[T]:
        for start in range(0, self._size, _CHUNK):
            yield from self._read(slice(start, min(start + _CHUNK, self._size)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


@dataclass(frozen=True, eq=False)
class RecordIndex:
    """Columns of all records of a store, in stored order.

    Attributes:
        id_bytes: uint8, the ids in UTF-8, one after another.
        id_ends: int64 [n], where they end in `id_bytes`.
        lengths: int64 [n], numbers of tokens.
        temperatures: float64 [n]; NaN: unknown.
        pass_order: int32 [n], numbers of a shard's records, pass by pass; −1 in a shard whose
            passes are unknown.
        pass_ends: uint8 [n], 1 where the last record of a pass stands in `pass_order`.
    """

    id_bytes: np.ndarray
    id_ends: np.ndarray
    lengths: np.ndarray
    temperatures: np.ndarray
    pass_order: np.ndarray
    pass_ends: np.ndarray

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        lengths: Sequence[int],
        temperatures: Sequence[float | None],
        batches: Sequence[Sequence[int]],
    ) -> RecordIndex:
        """Return the index of one shard's records.

        Args:
            batches: the record numbers of each forward pass; none: unknown.
        """
        texts = [id_.encode() for id_ in ids]
        ends = np.zeros(len(ids), np.uint8)
        ends[np.cumsum([len(batch) for batch in batches], dtype=int) - 1] = 1
        order = [number for batch in batches for number in batch] or [-1] * len(ids)
        return cls(
            np.frombuffer(b"".join(texts), np.uint8),
            np.cumsum([len(text) for text in texts], dtype=np.int64),
            np.array(lengths, np.int64),
            np.array([np.nan if t is None else t for t in temperatures], np.float64),
            np.array(order, np.int32),
            ends,
        )

    @classmethod
    def join(cls, windows: Sequence[Window]) -> RecordIndex:
        """Return the index of the records of several windows."""
        whole, end = windows[0].index, 0
        for index, start, stop in windows:
            if index is not whole or start != end:
                break
            end = stop
        else:
            if end == len(whole.lengths):
                return whole
        parts = [window.index._cut(window.start, window.stop) for window in windows]
        columns = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(cls)
        }
        id_lengths = [np.diff(part.id_ends, prepend=0) for part in parts]
        return cls(**columns | {"id_ends": np.concatenate(id_lengths).cumsum()})

    def _cut(self, start: int, stop: int) -> RecordIndex:
        """Return the index of some consecutive records."""
        begin, rest = self._id_start(start), slice(start, stop)
        columns = {field.name: getattr(self, field.name)[rest] for field in fields(self)[2:]}
        end = self._id_start(stop)
        return RecordIndex(self.id_bytes[begin:end], self.id_ends[rest] - begin, **columns)

    @classmethod
    def map(cls, path: Path) -> RecordIndex:
        """Map the file of an index.

        Raises:
            ValueError: it is not one; a stranger's store has the right hash of any file.
        """
        data = np.memmap(path, np.uint8, "r")
        start = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:start].tobytes()) if start <= len(data) else {}
        columns = {}
        for name, dtype in _DTYPES.items():
            try:
                begin, end = (start + offset for offset in header[name]["data_offsets"])
                stored = header[name]["dtype"]
            except (KeyError, TypeError):
                raise ValueError(f"expected the column {name}, found none") from None
            if stored != _NAMES[dtype]:
                raise ValueError(f"expected {name} in {_NAMES[dtype]}, found {stored!r}")
            columns[name] = data[begin:end].view(dtype)
        index = cls(**columns)
        index._check()
        return index

    def _check(self) -> None:
        """Raise a `ValueError` if the columns do not fit each other."""
        sizes = {name: len(getattr(self, name)) for name in _DTYPES if name != "id_bytes"}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"expected columns of one length, found {sizes}")
        ends = self.id_ends
        if np.any(ends[1:] < ends[:-1]) or (len(ends) and ends[-1] != len(self.id_bytes)):
            raise ValueError("expected ids that follow one another, found others")
        if np.any(self.lengths < 0):
            raise ValueError(f"expected lengths of at least 0, found {self.lengths.min()}")

    def to_bytes(self) -> bytes:
        """Return the content of the index's file."""
        return save({field.name: getattr(self, field.name) for field in fields(self)})

    def same_records(self, other: RecordIndex) -> bool:
        """Return whether ids and lengths are the same."""
        names = ("id_bytes", "id_ends", "lengths")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def _id_start(self, record: int) -> int:
        return int(self.id_ends[record - 1]) if record else 0

    def read_ids(self, rows: slice) -> list[str]:
        """Return the ids of consecutive records."""
        begin, ends = self._id_start(rows.start), self.id_ends[rows].tolist()
        text = self.id_bytes[begin : ends[-1] if ends else begin].tobytes()
        starts = [begin, *ends[:-1]]
        return [text[a - begin : b - begin].decode() for a, b in zip(starts, ends, strict=False)]

    def read_lengths(self, rows: slice) -> list[int]:
        """Return the lengths of consecutive records."""
        values: list[int] = self.lengths[rows].tolist()
        return values

    def read_temperatures(self, rows: slice) -> list[float | None]:
        """Return the temperatures of consecutive records."""
        return [None if t != t else t for t in self.temperatures[rows].tolist()]


class Window(NamedTuple):
    """The records start … stop − 1 of an index: those of one shard."""

    index: RecordIndex
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        """The window as a slice of the index."""
        return slice(self.start, self.stop)

    def batches(self) -> list[list[int]]:
        """Return the record numbers of each forward pass."""
        order: list[int] = self.index.pass_order[self.rows].tolist()
        batches: list[list[int]] = []
        start = 0
        for end in (np.flatnonzero(self.index.pass_ends[self.rows]) + 1).tolist():
            batches.append(order[start:end])
            start = end
        return batches
