"""Shards in manifests of schema 1 and 2, which listed them in manifest.json.

A store of an older schema is read, continued and identified as it is: the keys of trainings and the
receipts of interrupted recordings depend on its fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from draftlab.store.record_index import RecordIndex
from draftlab.store.shard import Shard, shard_file
from draftlab.store.shard_table import ShardTable, WrittenShard

_RECORDS = ("ids", "lengths", "temperatures", "batches")
"""Fields of a shard in schema 1, which had no index."""
_WRITTEN = tuple(WrittenShard.model_fields)


class _Shard(BaseModel):
    model_config = ConfigDict(extra="forbid")

    file: Annotated[str, Field(pattern=r"^shard-[0-9]{5,}\.safetensors$")]
    bytes: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    sha256: str | None = None
    not_finite: dict[str, str] = {}
    fp8_errors: list[tuple[float, float]] = []


_Count = Annotated[int, Field(ge=0, lt=2**31)]
"""A number of records or tokens, or of a record in its shard."""


class _Shard1(_Shard):
    ids: list[str]
    lengths: list[_Count]
    temperatures: list[float | None]
    batches: list[Annotated[list[_Count], Field(min_length=1)]]

    @model_validator(mode="after")
    def _check_records(self) -> _Shard1:
        count = len(self.ids)
        if not count == len(self.lengths) == len(self.temperatures):
            raise ValueError("expected an id, a length and a temperature of each record")
        if self.batches and sorted(chain.from_iterable(self.batches)) != list(range(count)):
            raise ValueError(f"expected batches of {count} records, each in one of them")
        return self


class _Shard2(_Shard):
    records: _Count
    tokens: Annotated[int, Field(ge=0)]


class OlderShards(BaseModel):
    """The field `shards` of a manifest."""

    shards: list[Any]

    @field_validator("shards", check_fields=False)
    @classmethod
    def _check_names(cls, shards: list[_Shard]) -> list[_Shard]:
        for number, shard in enumerate(shards):
            if shard.file != shard_file(number):
                raise ValueError(f"expected {shard_file(number)}, found {shard.file}")
        return shards

    def index(self, path: Path) -> RecordIndex:
        """Return the index of the records.

        Args:
            path: of the index's file, which schema 1 lacks.

        Raises:
            ValueError: the file or the shards' fields do not fit each other.
        """
        raise NotImplementedError

    def table(self, index: RecordIndex, boundaries: int) -> ShardTable | None:
        """Return the table of the shards; None if they are not written.

        Args:
            boundaries: see `ShardTable.of`.

        Raises:
            ValueError: only some of them are, or fields do not fit the index.
        """
        if all(shard.bytes is None for shard in self.shards):
            return None
        written = [WrittenShard(**shard.model_dump(include={*_WRITTEN})) for shard in self.shards]
        return ShardTable.of(index, boundaries, written)


class _Shards1(OlderShards):
    shards: Annotated[list[_Shard1], Field(min_length=1)]

    def index(self, path: Path) -> RecordIndex:
        ids, lengths, temperatures = (
            [value for shard in self.shards for value in getattr(shard, name)]
            for name in ("ids", "lengths", "temperatures")
        )
        counts = [len(shard.ids) for shard in self.shards]
        passes = [shard.batches for shard in self.shards]
        index = RecordIndex.of(ids, lengths, temperatures, counts, passes)
        index.check()
        return index


class _Shards2(OlderShards):
    shards: Annotated[list[_Shard2], Field(min_length=1)]

    def index(self, path: Path) -> RecordIndex:
        return RecordIndex.map(path, 2, np.array([shard.records for shard in self.shards]))


def parse_shards(shards: Any, schema: int) -> OlderShards:
    """Return the field `shards` of a manifest.

    Raises:
        ValidationError: it does not fit the schema.
    """
    return (_Shards1 if schema == 1 else _Shards2).model_validate({"shards": shards})


def dump_shards(shards: Iterable[Shard], schema: int) -> list[dict[str, Any]]:
    """Return the field `shards` of a manifest as JSON values."""
    return [_dump(shard, schema) for shard in shards]


def _dump(shard: Shard, schema: int) -> dict[str, Any]:
    records = _RECORDS if schema == 1 else ("records", "tokens")
    fields = {name: getattr(shard, name) for name in ("file", *records, *_WRITTEN)}
    return fields | {"fp8_errors": [list(errors) for errors in shard.fp8_errors]}
