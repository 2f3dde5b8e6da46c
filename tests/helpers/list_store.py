"""Records in memory; a process that packs them imports little else."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from draftlab.store.manifest import BOUNDARY_MEANING
from draftlab.store.shard_files import ShardFiles
from draftlab.store.store import Record


class ListManifest:
    """The manifest of records in memory, which have no shards.

    Args:
        records: their number.
    """

    def __init__(self, records: int) -> None:
        self.samples_sha256 = str(records)
        self.shards: list[Any] = []
        self.settings: dict[str, Any] = {}

    @property
    def num_kept(self) -> int:
        return len(self.shards)

    def dump(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "boundary_meaning": BOUNDARY_MEANING,
            "samples_sha256": self.samples_sha256,
            "shards": [],
        }


class ListStore:
    """Records in memory, with what the trainer asks a store for."""

    window = None

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.lengths = [len(r.tokens) for r in records]
        self.ids = [r.id for r in records]
        self.manifest = ListManifest(len(records))
        self.files = ShardFiles(Path())

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    def views(self, indices: Sequence[int]) -> list[Record]:
        return [self.records[i] for i in indices]

    def tokens_and_spans(self, index: int) -> tuple[Tensor, Tensor]:
        record = self.records[index]
        return record.tokens, record.spans


class SlowStore(ListStore):
    """Takes its time."""

    def views(self, indices: Sequence[int]) -> list[Record]:
        time.sleep(0.1)
        return super().views(indices)


class OddStore(ListStore):
    """Raises an error that cannot be pickled."""

    class OddError(Exception):
        def __init__(self, one: str, two: str) -> None:
            super().__init__(f"{one} and {two}")

    def views(self, indices: Sequence[int]) -> list[Record]:
        if len(indices) > 1:
            raise OddStore.OddError("this", "that")
        return super().views(indices)
