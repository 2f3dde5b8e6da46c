"""The window of a store (`record.window`): its shards are recorded while a training reads them.

The plan puts the held-out records into shards of their own, which come first and stay. The other
shards come and go: a training reads them group by group (`train/batch/window_order.py`), and
`workers/window/recorder.py` records and deletes them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from draftlab.errors import UserError
from draftlab.store.manifest import Manifest

KEY = "window"
"""Of the settings in a manifest."""


class HeldOut(NamedTuple):
    """What decides the held-out records: the share of validation, and the training's seed."""

    share: float
    seed: int


@dataclass(frozen=True)
class StoreWindow:
    """The window of a store, as its manifest has it.

    Attributes:
        size: most bytes of shards that come and go.
        rolls: whether they are deleted once they are read.
        validation_share, seed: what decided the held-out records.
        validation_records, validation_shards: numbers of the first records and shards, which are
            the held-out ones.
    """

    size: int
    rolls: bool
    validation_share: float
    seed: int
    validation_records: int
    validation_shards: int

    @classmethod
    def of(cls, manifest: Manifest) -> StoreWindow | None:
        """Return the window of a store; None: it has none."""
        values = manifest.settings.get(KEY)
        return cls(**{f.name: values[f.name] for f in fields(cls)}) if values else None

    def settings(self) -> dict[str, Any]:
        """Return the entry of a manifest's settings."""
        return {KEY: asdict(self)}


def num_kept_shards(manifest: Manifest) -> int:
    """Return how many of a store's first shards are kept: all; of a window the held-out ones."""
    window = StoreWindow.of(manifest)
    return window.validation_shards if window and window.rolls else len(manifest.shards)


def planned_sizes(manifest: Manifest) -> np.ndarray:
    """Return the bytes that each shard's file has at most, int64 [shards]."""
    index, header = manifest.index, 1024
    per_token = manifest.identity.bytes_per_token
    sizes: np.ndarray = index.shard_tokens * per_token + 8 * index.shard_records + header
    return sizes


def check_window(window: StoreWindow, sizes: np.ndarray) -> None:
    """Check that a window holds enough of the shards that come and go.

    Args:
        sizes: their bytes, int64.

    Raises:
        UserError: it holds fewer than four of the largest, and not all of them.
    """
    largest = int(sizes.max(initial=0))
    if window.size < 4 * largest and sizes.sum() > window.size // 2:
        raise UserError(
            f"expected a window of at least four shards, {4 * largest:,} bytes, found "
            f"{window.size:,}",
            where="record.window",
            do="raise it, or lower record.shard_tokens",
        )


class WindowFeed(Protocol):
    """What makes the shards of a window, as a training sees it.

    Groups are counted from the first epoch's first one on.
    """

    def begin(self, finished_groups: int) -> None:
        """Begin to make the groups behind the finished ones, on rank 0."""

    def wait(self, group: int) -> bool:
        """Wait for the shards of all groups up to this one; return whether any was missing.

        Raises:
            UserError: making them failed.
        """

    def report_finished_groups(self, count: int) -> None:
        """Report, on rank 0, how many groups no rank will read again."""

    def share_waited(self) -> float | None:
        """Return for how much of its time the recording has waited for room; None: not known."""

    def stop(self) -> None:
        """Have all `wait` end with an `InterruptedError`, since nothing is read any more."""
