"""Columns of a store in safetensors files, mapped into memory.

The processes that read a store share one copy of its columns, and nothing of them is a Python
object until it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftlab.errors import UserError
from draftlab.files import atomic_path

_CHUNK = 65_536


class Texts(Sequence[str]):
    """A read-only column of texts. Reading raises a `UserError` if they are not UTF-8.

    Args:
        utf8: uint8, the texts in UTF-8, one after another.
        ends: int64 [n], where they end in `utf8`.
    """

    def __init__(self, utf8: np.ndarray, ends: np.ndarray) -> None:
        self.utf8, self.ends = utf8, ends

    @classmethod
    def of(cls, texts: Sequence[str]) -> Texts:
        """Return texts as a column."""
        lengths, parts = np.zeros(len(texts), np.int64), []
        for start in range(0, len(texts), _CHUNK):  # one by one they would take seven times as much
            encoded = [text.encode() for text in texts[start : start + _CHUNK]]
            lengths[start : start + _CHUNK] = [len(one) for one in encoded]
            parts.append(b"".join(encoded))
        return cls(np.frombuffer(b"".join(parts), np.uint8), lengths.cumsum())

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        index = range(len(self))[index]
        return self.read(slice(index, index + 1))[0]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _CHUNK):
            yield from self.read(slice(start, min(start + _CHUNK, len(self))))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def read(self, rows: slice) -> list[str]:
        """Return consecutive texts, given by start and stop."""
        begin = int(self.ends[rows.start - 1]) if rows.start else 0
        ends = self.ends[rows].tolist()
        text = self.utf8[begin : ends[-1] if ends else begin].tobytes()
        pairs = zip([begin, *ends[:-1]], ends, strict=False)
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
        """Map the columns of a file; raise a `ValueError` if it is another one: a stranger's
        store has the right hash of any file.
        """
        return cls(**map_columns(path, cls.DTYPES))

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the file."""
        return {name: getattr(self, name) for name in self.DTYPES}

    def file_sha256(self) -> str:
        """Return the hex SHA-256 of the file."""
        return hashlib.sha256(save(self.columns())).hexdigest()


def write_columns(columns: Mapping[str, np.ndarray], path: Path) -> None:
    """Write columns atomically as a safetensors file."""
    with atomic_path(path) as temporary, open(temporary, "xb") as file:
        file.write(save(dict(columns)))


def map_columns(path: Path, dtypes: Mapping[str, type[np.generic]]) -> dict[str, np.ndarray]:
    """Map the columns of a safetensors file, by their names and dtypes; raise a `ValueError` if
    it is another file.
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
