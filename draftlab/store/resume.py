"""Receipts: which shards of a plan are committed.

The plan in the manifest decides the shards. A shard is committed when its receipt, a small JSON
file with the hashes of the plan and of the shard, is next to it. One process holds the lock of the
store's folder, publishes the plan and completes the store. It records the shards, or has other
processes record them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from draftlab.errors import UserError
from draftlab.files import (
    canonical_json,
    only_user,
    read_fields,
    remove,
    remove_leftovers,
    sha256_text,
    write_json,
)
from draftlab.progress import Monitor
from draftlab.settings import describe_errors
from draftlab.store.manifest import MANIFEST, Manifest, Shard
from draftlab.store.record_index import RECORDS
from draftlab.store.recording_plan import check_same_recording
from draftlab.store.shard import NO_FILE, SHARDS, ShardTable, WrittenShard
from draftlab.store.shard_files import ShardFiles

NOT_WRITTEN = WrittenShard(bytes=0, sha256="0" * 64)
"""In the table of a complete store: a shard that comes and goes (`StoreWindow`)."""


def lock_folder(folder: Path) -> AbstractContextManager[None]:
    """Lock a store against other processes that record into it (`only_user`)."""
    return only_user(
        folder,
        "another process is recording into this store",
        "wait for it; --gpus N shares the work on one machine, --ray on several",
    )


class Receipts:
    """The receipts of the shards of an incomplete store's plan, in the store's folder.

    The shards are in `files`, by default in the same folder.
    """

    def __init__(self, folder: Path, plan: Manifest, files: ShardFiles | None = None) -> None:
        self.folder, self.plan = folder, plan
        self.files = files or ShardFiles(folder)
        self.key = sha256_text(canonical_json(plan.dump()))
        self._version: tuple[int, int] | None = None

    @classmethod
    def from_published(cls, folder: Path, files: ShardFiles | None = None) -> Receipts:
        """Return the receipts of the plan that another process has published in a folder."""
        version = _manifest_version(folder)
        receipts = cls(folder, Manifest.read(folder / MANIFEST), files)
        receipts._version = version
        return receipts

    def publish(self) -> None:
        """Write the plan, for other processes and for a resumed recording, unless it is there."""
        path = self.folder / MANIFEST
        if not path.exists() or Manifest.read(path).dump() != self.plan.dump():
            self.plan.write(self.folder)
        self.files.publish(self.folder)
        self._version = _manifest_version(self.folder)

    def receipt_path(self, shard: Shard) -> Path:
        """Return the path of a shard's receipt."""
        return (self.folder / shard.file).with_suffix(".json")

    def commit(self, shard: Shard, fields: dict[str, Any], writer: str | None = None) -> None:
        """Write a shard's receipt, of the fields of a `WrittenShard`; `writer` as for
        `atomic_path`.
        """
        receipt = {"plan": self.key, **WrittenShard(**fields).model_dump()}
        write_json(self.receipt_path(shard), receipt, writer=writer)

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not committed, of those that stay."""
        listing, kept = self.files.list(), self.plan.num_kept
        sizes = (
            (shard, listing.get(shard.number, NO_FILE)[0]) for shard in self.plan.shards[:kept]
        )
        return [shard.number for shard, size in sizes if not self.is_committed(shard, size)]

    def is_committed(self, shard: Shard, size: int | None = None) -> bool:
        """Return whether a shard has a receipt of this plan, and the file the receipt's size
        (None: it is asked for).
        """
        if size == -1 or (receipt := self.read(shard)) is None:
            return False
        return receipt.bytes == (self.files.size(shard) if size is None else size)

    def read(self, shard: Shard) -> WrittenShard | None:
        """Return a shard's receipt of this plan; None if there is none."""
        path = self.receipt_path(shard)
        try:
            receipt = read_fields(path, {}, kind="shard's receipt")
        except UserError:
            if path.exists():
                raise
            return None  # other processes may remove it at any time
        if receipt.pop("plan", None) != self.key:
            return None
        try:
            return WrittenShard.model_validate(receipt)
        except ValidationError as error:
            raise UserError(
                f"expected a shard's receipt, found another file:\n  {describe_errors(error)}",
                where=path,
                do="remove it; the same command records the shard again",
            ) from None

    def discard(self, shard: Shard) -> None:
        """Remove a shard's receipt, which is that of an older file, before the shard is written."""
        self.receipt_path(shard).unlink(missing_ok=True)

    def check_plan(self) -> None:
        """Raise a `UserError` unless the folder still has this plan.

        A writer may outlive the process that gave it work, for as long as nobody has noticed that a
        machine lost its network.
        """
        if _manifest_version(self.folder) != self._version:
            raise UserError(
                "expected the plan of this recording, found that another process has completed or "
                "replaced it",
                where=self.folder / MANIFEST,
                do="run the command again",
            )

    def complete(self) -> None:
        """Write the manifest of the complete store, with the fields of the receipts; raise a
        `UserError` without one of this plan.

        Those of shards that come and go are blank.
        """
        boundaries = self.plan.identity.fp8_boundaries
        table = ShardTable.of(self.plan.index, boundaries, self._written())
        self.plan.completed(table).write(self.folder)

    def _written(self) -> Iterator[WrittenShard]:
        """Yield the fields of all shards; of a million, few are in memory at a time."""
        num_kept = self.plan.num_kept
        for shard in self.plan.shards:
            receipt = self.read(shard) if shard.number < num_kept else NOT_WRITTEN
            if receipt is None:  # a process that works on a former plan has replaced it
                raise UserError(
                    "expected a shard of this recording, found one that another process has "
                    "written or removed since",
                    where=self.folder / shard.file,
                    do="end all other processes that record into this folder, and run the same "
                    "command again: whole shards are kept",
                )
            yield receipt

    def clear(self) -> None:
        """Remove receipts after the store is complete."""
        for shard in self.plan.shards:
            self.receipt_path(shard).unlink(missing_ok=True)
        remove_leftovers(self.folder, ".locks.*.tmp")  # of `check_locks`
        self.remove_temporary()

    def remove_temporary(self) -> None:
        """Remove what killed processes left."""
        for path in self.folder.glob(".shard-*"):
            remove(path)


def _manifest_version(folder: Path) -> tuple[int, int]:
    """Return a value that changes when the manifest is written again."""
    stat = (folder / MANIFEST).stat()
    return stat.st_ino, stat.st_mtime_ns


def resume_plan(
    folder: Path, plan: Manifest, monitor: Monitor, files: ShardFiles | None = None
) -> Manifest:
    """Return the plan to follow: the folder's own if there is one, because of its batches.

    The manifest of a complete store with all its shards is returned unchanged. A complete store
    without some of its shards is turned back into its plan and the receipts of the other shards.

    Raises:
        UserError: the folder holds another recording.
    """
    for path in folder.glob(".*.tmp"):
        if path.name.startswith(tuple(f".{name}." for name in (MANIFEST, RECORDS, SHARDS))):
            path.unlink()
    if not (folder / MANIFEST).exists():
        return plan
    fields = read_fields(folder / MANIFEST, {}, kind="store's manifest.json")
    if fields.get("records_sha256") == plan.records_sha256:
        plan.write_index(folder)  # it may be damaged
    manifest = Manifest.read(folder / MANIFEST)
    check_same_recording(manifest, plan, folder)
    if not manifest.complete:
        return manifest
    receipts = Receipts(folder, manifest.as_plan(), files)
    kept, listing = manifest.shards[: manifest.num_kept], receipts.files.list()
    problems = [shard.problem(listing.get(shard.number, NO_FILE)[0]) for shard in kept]
    if not any(problems):
        return manifest
    for shard, problem in zip(kept, problems, strict=True):
        if problem:
            monitor.say(f"{shard.file}: {problem}; it is recorded again")
        else:
            receipts.commit(shard, shard.written())
    return receipts.plan
