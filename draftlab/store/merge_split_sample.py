"""New stores made from the records of stores. States are copied bit for bit, never recomputed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab.errors import UserError
from draftlab.files import (
    canonical_json,
    check_folder,
    sha256_text,
)
from draftlab.progress import Monitor
from draftlab.store.batches import group_consecutive
from draftlab.store.manifest import Counts, Dropped, Manifest
from draftlab.store.record_index import RecordIndex
from draftlab.store.shard import Shard, Shards, shard_file
from draftlab.store.shard_file import write_shard
from draftlab.store.shard_table import ShardTable, WrittenShard
from draftlab.store.store import Store


def merge(stores: Sequence[Store], folder: Path, monitor: Monitor) -> Store:
    """Write a store with all records of stores of one identity, in order.

    Shards are hard links where the file system supports them.

    Raises:
        UserError: the identities differ, two stores share an id, a shard is damaged, or the folder
            is not empty.
    """
    for store in stores[1:]:
        store.identity.check(stores[0].identity, store.address)
    _check_unique_ids(stores)
    manifests = [store.manifest for store in stores]
    total, number = sum(len(manifest.shards) for manifest in manifests), 0
    with _new_folder(folder) as new:
        for store in stores:
            for shard in store.manifest.shards:
                _copy_shard(store, shard, new / shard_file(number))
                number += 1
                monitor.progress("merge", number, total)
        tables = [manifest.written for manifest in manifests]
        _write_manifest(
            new,
            stores,
            RecordIndex.join([manifest.index for manifest in manifests]),
            ShardTable.join(tables, [len(store) for store in stores]),
            {"made_by": "merge"},
            Counts(**_sums([manifest.counts for manifest in manifests])),
            Dropped(**_sums([manifest.dropped for manifest in manifests])),
            sum(manifest.truncated for manifest in manifests),
        )
    return Store.open(folder)


def select(
    store: Store,
    records: Sequence[int] | np.ndarray,
    folder: Path,
    made_by: dict[str, Any],
    monitor: Monitor,
    *,
    shard_tokens: int = 32_768,
) -> Store:
    """Write a store with some records of a store, in the given order.

    Args:
        records: record numbers, each at most once.
        made_by: how they were chosen; JSON values for the manifest's settings.

    Raises:
        UserError: there are no records, a shard is damaged, or the folder is not empty.
    """
    records = np.asarray(records).tolist()
    if not records:
        raise UserError(
            "expected records to write, found none",
            where=folder,
            do="choose a larger share, or another source",
        )
    lengths = [store.lengths[record] for record in records]
    groups = group_consecutive(lengths, shard_tokens)
    index = RecordIndex.of(
        [store.ids[record] for record in records],
        lengths,
        [store.temperatures[record] for record in records],
        [len(group) for group in groups],
        [[]] * len(groups),
    )
    old = store.manifest.written
    locations = dict(zip(old.not_finite_records.tolist(), old.not_finite, strict=True))
    shards, loss_tokens = [], 0
    with _new_folder(folder) as new:
        for number, group in enumerate(groups):
            members = [records[i] for i in group]
            if store.files.is_local:  # others are verified when they are read
                store.verify(store.shards_of(members))
            rows = [store.raw_tensors(record) for record in members]
            tensors = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            tensors["offsets"] = torch.tensor([0, *(lengths[i] for i in group)]).cumsum(0)
            try:
                size, digest = write_shard(tensors, new / shard_file(number))
            except OSError as error:
                raise UserError(
                    f"a shard could not be written: {error}", where=folder, do="free disk space"
                ) from None
            not_finite = {store.ids[i]: locations[i] for i in members if i in locations}
            shards.append(WrittenShard(bytes=size, sha256=digest, not_finite=not_finite))
            loss_tokens += int((tensors["spans"] > 0).sum())
            monitor.progress("store", number + 1, len(groups))
        counts = Counts(records=len(records), tokens=sum(lengths), loss_tokens=loss_tokens)
        table = ShardTable.of(index, store.identity.fp8_boundaries, shards)
        _write_manifest(new, [store], index, table, made_by, counts, Dropped(), 0)
    return Store.open(folder)


def _sums(models: Sequence[Counts] | Sequence[Dropped]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for model in models:
        total.update(model.model_dump())
    return dict(total)


def _check_unique_ids(stores: Sequence[Store]) -> None:
    id_, count = Counter(id_ for store in stores for id_ in store.ids).most_common(1)[0]
    if count > 1:
        folders = [str(store.address) for store in stores if id_ in store.ids]
        raise UserError(
            f"expected every record in one store, found {id_!r} in {' and '.join(folders)}",
            do="leave one of the stores out, or record its conversations under other ids",
        )


def check_new_folder(folder: Path) -> None:
    """Check that a folder is empty or can be made.

    Raises:
        UserError: it is not, or it cannot.
    """
    check_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            "expected a new folder to write to, found one with files",
            where=folder,
            do="name another folder: --out FOLDER",
        )


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` on success."""
    check_new_folder(folder)
    new = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _copy_shard(store: Store, shard: Shard, to: Path) -> None:
    """Copy a shard whose hash is right; link it if it is in a folder."""
    if not store.files.is_local:
        with store.files.local_file(shard) as path:
            shutil.copyfile(path, to)
        return
    store.verify([shard.number])
    with store.files.local_file(shard) as path:
        _link(path, to)


def _link(source: Path, to: Path) -> None:
    try:
        os.link(source.resolve(), to)  # of a symbolic link, the file that it leads to
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, to)


def _write_manifest(
    folder: Path,
    stores: Sequence[Store],
    index: RecordIndex,
    table: ShardTable,
    made_by: dict[str, Any],
    counts: Counts,
    dropped: Dropped,
    truncated: int,
) -> None:
    sources = [store.manifest.samples_sha256 for store in stores]
    shard_ids = [shard.ids for shard in Shards(index, table)]
    manifest = Manifest.plan(
        index,
        identity=stores[0].identity,
        samples_sha256=sha256_text(canonical_json([sources, made_by, shard_ids])),
        settings={**made_by, "sources": [store.manifest.settings for store in stores]},
        counts=counts,
        dropped=dropped,
        truncated=truncated,
    )
    manifest.completed(table).write(folder)
