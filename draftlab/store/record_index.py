"""The index of a store's records (records.safetensors): which record is where, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from draftlab.store.columns import ColumnFile, Texts

RECORDS = "records.safetensors"


@dataclass(frozen=True, eq=False)
class RecordIndex(ColumnFile):
    """Columns of all records of a store, in stored order.

    Attributes:
        id_bytes: uint8, the ids in UTF-8, one after another.
        id_ends: int64 [n], where they end in `id_bytes`.
        lengths: int32 [n], numbers of tokens.
        temperatures: float64 [n]; NaN: unknown.
        shard_records: int64 [shards], numbers of records.
    """

    DTYPES: ClassVar = {
        "id_bytes": np.uint8,
        "id_ends": np.int64,
        "lengths": np.int32,
        "temperatures": np.float64,
        "shard_records": np.int64,
    }
    id_bytes: np.ndarray
    id_ends: np.ndarray
    lengths: np.ndarray
    temperatures: np.ndarray
    shard_records: np.ndarray

    @classmethod
    def of(
        cls,
        ids: Sequence[str],
        lengths: Sequence[int] | np.ndarray,
        temperatures: Sequence[float | None] | np.ndarray,
        shard_records: Sequence[int] | np.ndarray,
    ) -> RecordIndex:
        """Return the index of records in stored order, of so many in each shard."""
        texts = Texts.of(ids)
        return cls(
            texts.utf8,
            texts.ends,
            np.array(lengths, np.int32),
            np.array(temperatures, np.float64),  # None becomes NaN
            np.array(shard_records, np.int64),
        )

    @classmethod
    def map(cls, path: Path) -> RecordIndex:
        index = super().map(path)
        index.check()
        return index

    def check(self) -> None:
        """Raise a `ValueError` if the columns do not fit each other."""
        names = ("id_ends", "lengths", "temperatures")
        shapes = {name: getattr(self, name).shape for name in names}
        if len(set(shapes.values())) > 1 or self.lengths.ndim != 1 or self.shard_records.ndim != 1:
            raise ValueError(f"expected columns of one length, found {shapes}")
        self.ids.check()
        if self.lengths.min(initial=0) < 0:
            raise ValueError(f"expected lengths of at least 0, found {self.lengths.min()}")
        shards, count = self.shard_records, len(self.lengths)
        if not len(shards) or shards.min() < 0 or shards.max() > count or shards.sum() != count:
            raise ValueError(
                f"expected {count} records in at least one shard, found "
                f"{sum(shards.tolist())} in {len(shards)}"
            )

    def same_records(self, other: RecordIndex) -> bool:
        """Return whether ids and lengths are the same."""
        names = ("id_bytes", "id_ends", "lengths")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    @cached_property
    def ids(self) -> Texts:
        """The records' ids."""
        return Texts(self.id_bytes, self.id_ends)

    @cached_property
    def shard_ends(self) -> np.ndarray:
        """int64 [shards]: the number behind each shard's last record."""
        return self.shard_records.cumsum()

    @cached_property
    def shard_tokens(self) -> np.ndarray:
        """int64 [shards]: numbers of tokens."""
        tokens, filled = np.zeros(len(self.shard_records), np.int64), self.shard_records > 0
        starts = (self.shard_ends - self.shard_records)[filled]
        tokens[filled] = np.add.reduceat(self.lengths, starts, dtype=np.int64)
        return tokens

    def shards_of(self, records: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers of the shards that hold records, one for each."""
        return np.searchsorted(self.shard_ends, records, side="right")
