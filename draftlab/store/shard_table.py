"""The table of a store's written shards (shards.safetensors): sizes, hashes and errors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from draftlab.store.columns import Texts, columns_sha256, map_columns, write_columns
from draftlab.store.record_index import RecordIndex

SHARDS = "shards.safetensors"
_DTYPES: dict[str, type[np.generic]] = {
    "bytes": np.int64,
    "sha256": np.uint8,
    "fp8_errors": np.float64,
    "not_finite_records": np.int64,
    "not_finite_bytes": np.uint8,
    "not_finite_ends": np.int64,
}


class WrittenShard(BaseModel):
    """The fields of a shard's receipt that describe its file."""

    model_config = ConfigDict(extra="forbid")

    bytes: Annotated[int, Field(ge=0, lt=2**63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    not_finite: dict[str, str] = {}
    """Ids of records with NaN or infinity, and where: stored as zeros, with no answer span."""
    fp8_errors: list[tuple[float, float]] = []
    """For each boundary, the relative error of its features as read, and of its worst channel."""


@dataclass(frozen=True, eq=False)
class ShardTable:
    """Columns of all shards of a complete store.

    Attributes:
        bytes: int64 [shards], sizes of the files.
        sha256: uint8 [shards, 32], hashes of the files.
        fp8_errors: float64 [shards, boundaries, 2], for each boundary the relative error of its
            features as read, and of its worst channel; NaN: unknown. Other dtypes have no
            boundaries here.
        not_finite_records: int64 [m], numbers in the store of records with NaN or infinity.
        not_finite_bytes, not_finite_ends: where these records have them, as in `Texts`.
    """

    bytes: np.ndarray
    sha256: np.ndarray
    fp8_errors: np.ndarray
    not_finite_records: np.ndarray
    not_finite_bytes: np.ndarray
    not_finite_ends: np.ndarray

    @classmethod
    def of(cls, index: RecordIndex, boundaries: int, shards: Iterable[WrittenShard]) -> ShardTable:
        """Return the table of the shards of an index, in order.

        Args:
            boundaries: of an fp8 store; 0 for other dtypes.
        """
        count = len(index.shard_records)
        sizes, hashes = np.zeros(count, np.int64), np.zeros((count, 32), np.uint8)
        errors = np.full((count, boundaries, 2), np.nan)
        records, locations = [], []
        for number, shard in zip(range(count), shards, strict=True):
            sizes[number] = shard.bytes
            hashes[number] = np.frombuffer(bytes.fromhex(shard.sha256), np.uint8)
            if shard.fp8_errors:
                errors[number] = shard.fp8_errors
            if shard.not_finite:
                stop = int(index.shard_ends[number])
                start = stop - int(index.shard_records[number])
                ids = index.ids.read(slice(start, stop))
                records += [start + ids.index(id_) for id_ in shard.not_finite]
                locations += shard.not_finite.values()
        texts = Texts.of(locations)
        return cls(sizes, hashes, errors, np.array(records, np.int64), texts.utf8, texts.ends)

    @classmethod
    def join(cls, tables: Sequence[ShardTable], records: Sequence[int]) -> ShardTable:
        """Return the table of the shards of several stores, one after another.

        Args:
            records: numbers of records of the stores.
        """
        columns = {
            field.name: np.concatenate([getattr(table, field.name) for table in tables])
            for field in fields(cls)
        }
        starts = np.cumsum([0, *records[:-1]])
        numbers = [t.not_finite_records + start for t, start in zip(tables, starts, strict=True)]
        ends = Texts.join([table.not_finite for table in tables]).ends
        return cls(
            **columns | {"not_finite_records": np.concatenate(numbers), "not_finite_ends": ends}
        )

    @classmethod
    def map(cls, path: Path, index: RecordIndex, boundaries: int) -> ShardTable:
        """Map the file of a table.

        Args:
            boundaries: as in `of`.

        Raises:
            ValueError: it is another file, or one of another store.
        """
        table = cls(**map_columns(path, _DTYPES))
        count, places = len(index.shard_records), len(table.not_finite_records)
        for column, shape in (
            (table.bytes, (count,)),
            (table.sha256, (count, 32)),
            (table.fp8_errors, (count, boundaries, 2)),
            (table.not_finite_records, (places,)),
            (table.not_finite_ends, (places,)),
        ):
            if column.shape != shape:
                raise ValueError(f"expected columns of {count} shards, found shape {column.shape}")
        table.not_finite.check()
        numbers = table.not_finite_records
        if np.any((numbers < 0) | (numbers >= len(index.lengths))):
            raise ValueError(f"expected numbers of {len(index.lengths)} records, found others")
        return table

    def columns(self) -> dict[str, np.ndarray]:
        """Return the columns of the file."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def file_sha256(self) -> str:
        """Return the hex SHA-256 of the file."""
        return columns_sha256(self.columns())

    def write(self, path: Path) -> None:
        """Write the file."""
        write_columns(self.columns(), path)

    @cached_property
    def not_finite(self) -> Texts:
        """The places of NaN or infinity in the records `not_finite_records`."""
        return Texts(self.not_finite_bytes, self.not_finite_ends)
