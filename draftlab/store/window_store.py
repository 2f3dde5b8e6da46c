"""The store of a training whose shards come and go (`store/window.py`)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from draftlab.errors import UserError
from draftlab.store.completeness import check_complete
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.samples import Sample, SampleTable, Selection
from draftlab.store.shard_file import map_shard
from draftlab.store.shard_files import ShardFiles, open_shard_files
from draftlab.store.store import Record, Store
from draftlab.store.window import WindowFeed, num_kept_shards

_DO = "run the same command again, which records the shards that it needs"


class WindowStore(Store):
    """A store with a window. Token ids and spans are those of its samples.

    A shard that comes and goes is mapped for one call of `views` only: the disk space of a deleted
    file is free once nobody maps it.

    Args:
        folder: the store's folder.
        manifest: of the store.
        samples: in stored order; None: tokens are read from the shards.
        files: of the shards; None: they are in the folder.

    Attributes:
        feed: what makes the shards; None: they are there.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        samples: Sequence[Sample] | None = None,
        files: ShardFiles | None = None,
    ) -> None:
        super().__init__(folder, manifest, files=files)
        self.samples, self.feed = samples, None
        self._num_kept, self._open_kept = num_kept_shards(manifest), self._open_shard
        self._open_shard = self._open_any
        self._mapped = threading.local()

    feed: WindowFeed | None

    @classmethod
    def of_run(cls, folder: Path, samples: SampleTable, url: str | None = None) -> WindowStore:
        """Open a store with a window, whose shards may be missing if they come and go.

        Args:
            samples: that it was planned from.
            url: where the shards are (`record.url`); None: in the folder.

        Raises:
            UserError: as `Store.open`, or these are other samples.
        """
        manifest = Manifest.read(folder / MANIFEST)
        files = open_shard_files(folder, url)
        check_complete(files, manifest, files.list())
        if manifest.samples_sha256 != samples.sha256:
            raise UserError(
                "expected the answers that this store was planned from, found others",
                where=folder,
                do="restore answers.jsonl, or remove the store to record it again",
            )
        rows = {id_: row for row, id_ in enumerate(samples.ids)}
        order = np.array([rows[id_] for id_ in manifest.index.ids], int)
        selection = Selection(samples, order, manifest.settings["max_length"])
        return cls(folder, manifest, selection, files)

    def views(self, indices: Sequence[int]) -> list[Record]:
        """Return the views of several records; each shard is mapped once."""
        self._mapped.shards = {}
        try:
            return super().views(indices)
        finally:
            self._mapped.shards = None

    def _open_any(self, number: int) -> dict[str, Tensor]:
        if number < self._num_kept:
            return self._open_kept(number)
        kept: dict[int, dict[str, Tensor]] | None = getattr(self._mapped, "shards", None)
        if kept is None:
            return self._map(number)
        if number not in kept:
            kept[number] = self._map(number)
        return kept[number]

    def _map(self, number: int) -> dict[str, Tensor]:
        return map_shard(self.files, self.manifest.shards[number], self.identity, _DO)
