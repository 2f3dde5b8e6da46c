"""Columns of a store in safetensors files, mapped into memory.

The processes that read a store share one copy of its columns, and nothing of them is a Python
object until it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, overload

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftlab.errors import UserError
from draftlab.files import atomic_path

T = TypeVar("T")
_CHUNK = 65_536


class Column(Sequence[T]):
    """A read-only column. A subclass says how values are read."""

    def read(self, rows: slice) -> list[T]:
        """Return the values of consecutive rows, given by start and stop."""
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self.read(slice(start, stop))[::step] if step > 0 else list(self)[index]
        index = range(len(self))[index]
        return self.read(slice(index, index + 1))[0]

    def __iter__(self) -> Iterator[T]:
        for start in range(0, len(self), _CHUNK):
            yield from self.read(slice(start, min(start + _CHUNK, len(self))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class Numbers(Column[Any]):
    """A column of numbers; NaN is read as None.

    `np.asarray` of it returns the array, without a copy.

    Args:
        array: [n].
    """

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def read(self, rows: slice) -> list[Any]:
        values: list[Any] = self._array[rows].tolist()
        is_float = self._array.dtype.kind == "f"
        return [None if value != value else value for value in values] if is_float else values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self._array, dtype, copy=copy)


class Texts(Column[str]):
    """A column of texts. Reading raises a `UserError` if they are not UTF-8.

    Args:
        utf8: uint8, the texts in UTF-8, one after another.
        ends: int64 [n], where they end in `utf8`.
    """

    def __init__(self, utf8: np.ndarray, ends: np.ndarray) -> None:
        self.utf8, self.ends = utf8, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Return texts as a column."""
        if isinstance(texts, Texts):
            return texts
        encoded = [text.encode() for text in texts]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return cls(np.frombuffer(b"".join(encoded), np.uint8), lengths.cumsum())

    @classmethod
    def join(cls, columns: Sequence[Texts]) -> Texts:
        """Return the texts of several columns, one after another."""
        lengths = [np.diff(column.ends, prepend=0) for column in columns]
        utf8 = np.concatenate([column.utf8 for column in columns])
        return cls(utf8, np.concatenate(lengths).cumsum())

    def __len__(self) -> int:
        return len(self.ends)

    def read(self, rows: slice) -> list[str]:
        begin = int(self.ends[rows.start - 1]) if rows.start else 0
        ends = self.ends[rows].tolist()
        text = self.utf8[begin : ends[-1] if ends else begin].tobytes()
        starts = [begin, *ends[:-1]]
        pairs = zip(starts, ends, strict=False)
        try:
            return [text[a - begin : b - begin].decode() for a, b in pairs]
        except UnicodeDecodeError:  # a stranger's file; to look at all at once would map them
            raise UserError(
                f"expected texts in UTF-8 in the store's columns, found others in rows "
                f"{rows.start:,} to {rows.stop - 1:,}",
                do="fetch the store again, or record it again",
            ) from None

    def check(self) -> None:
        """Raise a `ValueError` if the texts do not follow one another."""
        ends = self.ends
        last = int(ends[-1]) if len(ends) else 0
        if last != len(self.utf8) or np.any(ends[1:] < ends[:-1]) or np.any(ends[:1] < 0):
            raise ValueError("expected texts that follow one another, found others")


@dataclass(frozen=True, eq=False)
class ColumnFile:
    """The columns of a safetensors file, which are the fields of a subclass."""

    DTYPES: ClassVar[dict[str, type[np.generic]]]

    @classmethod
    def map(cls, path: Path) -> Self:
        """Map the columns of a file.

        Raises:
            ValueError: it is another file; a stranger's store has the right hash of any file.
        """
        return cls(**map_columns(path, cls.DTYPES))

    @classmethod
    def concatenate(cls, files: Sequence[Self]) -> dict[str, np.ndarray]:
        """Return the columns of several files, one after another."""
        return {name: np.concatenate([getattr(one, name) for one in files]) for name in cls.DTYPES}

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the file."""
        return {name: getattr(self, name) for name in self.DTYPES}

    def file_sha256(self) -> str:
        """Return the hex SHA-256 of the file."""
        digest = hashlib.sha256()
        for block in _file_content(self.columns()):
            digest.update(block)
        return digest.hexdigest()

    def write(self, path: Path) -> None:
        """Write the file."""
        write_columns(self.columns(), path)


def safetensors_header(
    example: bytes, tensors: Mapping[str, tuple[Sequence[int], int]]
) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file, and the names of its tensors in the file's order.

    Args:
        example: a safetensors file of tensors with these names and dtypes and any shapes. The
            format's library orders tensors by dtype and name, and names the dtypes.
        tensors: their shapes and sizes in bytes.
    """
    entries = json.loads(example[8 : 8 + int.from_bytes(example[:8], "little")])
    start = 0
    for name, entry in entries.items():
        shape, size = tensors[name]
        entry |= {"shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, list(entries)


def _file_content(columns: Mapping[str, np.ndarray]) -> Iterator[bytes | np.ndarray]:
    """Yield the content of a safetensors file of columns, without a copy of them."""
    example = save({name: np.zeros(1, column.dtype) for name, column in columns.items()})
    shapes = {name: (column.shape, column.nbytes) for name, column in columns.items()}
    header, names = safetensors_header(example, shapes)
    yield header
    for name in names:
        yield np.ascontiguousarray(columns[name]).reshape(-1).view(np.uint8)


def write_columns(columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Write columns atomically as a safetensors file."""
    with atomic_path(path) as temporary, open(temporary, "xb") as file:
        for block in _file_content(columns):
            file.write(block)


def map_columns(path: Path, dtypes: Mapping[str, type[np.generic]]) -> dict[str, np.ndarray]:
    """Map the columns of a safetensors file.

    Args:
        dtypes: by the names of the columns.

    Raises:
        ValueError: it is another file.
    """
    columns = {}
    try:
        with safe_open(path, "pt") as file:  # whose tensors, unlike arrays, are mapped
            for name, dtype in dtypes.items():
                columns[name] = column = file.get_tensor(name).numpy()
                if column.dtype != dtype:
                    raise ValueError(f"expected {name} in {dtype.__name__}, found {column.dtype}")
    except (SafetensorError, TypeError) as error:
        raise ValueError(str(error)) from None
    return columns
