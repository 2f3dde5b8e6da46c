"""Records in memory; a process that packs them imports little else."""

from __future__ import annotations

from collections.abc import Sequence

from draftlab.store.manifest import Manifest
from draftlab.store.store import Record


class ListStore:
    """Records in memory, with what the trainer asks a store for."""

    on_disk = True  # or could be pickled, which is as good
    window = None

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.lengths = [len(r.tokens) for r in records]
        self.ids = [r.id for r in records]
        self.manifest = Manifest.model_construct(samples_sha256=str(len(records)), shards=[])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        return self.records[index]

    def views(self, indices: Sequence[int]) -> list[Record]:
        return [self.records[i] for i in indices]
