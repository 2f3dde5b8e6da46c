"""Merge stores into one. States are copied bit for bit, never recomputed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from draftlab.errors import UserError
from draftlab.files import atomic_folder, canonical_json, check_new_folder, sha256_text
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Counts, Dropped, Manifest, template_arguments_setting
from draftlab.store.record_index import RecordIndex
from draftlab.store.shard import Shard, Shards, ShardTable, WrittenShard, shard_file
from draftlab.store.store import Store

T = TypeVar("T", Counts, Dropped)


def merge(stores: Sequence[Store], folder: Path, monitor: Monitor) -> Store:
    """Write a store with all records of stores of one identity, in order.

    Shards are hard links where the file system supports them.

    Raises:
        UserError: the identities differ, two stores share an id, a shard is damaged, or the folder
            is not empty or is inside a store.
    """
    for store in stores[1:]:
        store.identity.check(
            stores[0].identity,
            store.address,
            do="merge only stores of one target with the same boundaries and dtype; leave this one "
            "out, or record its answers again from that target into a new store",
        )
    manifests = [store.manifest for store in stores]
    _check_ids(stores)
    _check_new(folder)
    shards = [(store, shard) for store in stores for shard in store.manifest.shards]
    with atomic_folder(folder) as new:
        for number, (store, shard) in enumerate(shards):
            _copy_shard(store, shard, new / shard_file(number))
            monitor.progress("merge", number + 1, len(shards))
        index = RecordIndex.of(
            [id_ for store in stores for id_ in store.ids],
            *(
                np.concatenate([getattr(manifest.index, name) for manifest in manifests])
                for name in ("lengths", "temperatures", "shard_records")
            ),
        )
        written = (WrittenShard(**shard.written()) for _, shard in shards)
        table = ShardTable.of(index, stores[0].identity.fp8_boundaries, written)
        made_by = {"made_by": "merge"}
        shard_ids = [shard.ids for shard in Shards(index, table)]
        sources = [manifest.samples_sha256 for manifest in manifests]
        manifest = Manifest.plan(
            index,
            identity=stores[0].identity,
            samples_sha256=sha256_text(canonical_json([sources, made_by, shard_ids])),
            settings={
                **made_by,
                "sources": [manifest.settings for manifest in manifests],
                **template_arguments_setting(_all_modes(stores)),
            },
            counts=_sum([manifest.counts for manifest in manifests]),
            dropped=_sum([manifest.dropped for manifest in manifests]),
            truncated=sum(manifest.truncated for manifest in manifests),
        )
        manifest.completed(table).write(new)
    return Store.open(folder)


def _sum(models: Sequence[T]) -> T:
    names = type(models[0]).model_fields
    return type(models[0])(**{name: sum(getattr(one, name) for one in models) for name in names})


def _check_ids(stores: Sequence[Store]) -> None:
    """Raise a `UserError` if two records have one id."""
    id_, count = Counter(id_ for store in stores for id_ in store.ids).most_common(1)[0]
    if count > 1:
        folders = [str(store.address) for store in stores if id_ in store.ids]
        raise UserError(
            f"expected every record in one store, found {id_!r} in {' and '.join(folders)}",
            do="leave one of the stores out, or record its conversations under other ids",
        )


def _all_modes(stores: Sequence[Store]) -> list[dict[str, Any]] | None:
    """Return the different template arguments of all stores; None: too many to list."""
    found: list[dict[str, Any]] = []
    for store in stores:
        if (modes := store.manifest.template_arguments) is None:
            return None
        found += [one for one in modes if one not in found]
    return found


def _check_new(folder: Path) -> None:
    """Raise a `UserError` if a folder is not empty, inside a store, or cannot be written to."""
    check_new_folder(folder, "name another folder: --out FOLDER")
    for parent in folder.resolve().parents:
        if (parent / MANIFEST).is_file():
            raise UserError(
                f"expected a folder outside of all stores, found one inside the store {parent}",
                where=folder,
                do="name a folder beside it: --out FOLDER",
            )


def _copy_shard(store: Store, shard: Shard, to: Path) -> None:
    """Copy a shard whose hash is right; link it if it is in a folder."""
    with store.files.local_file(shard) as path:  # which a download has checked
        if store.files.is_local:
            store.verify([shard.number])
            with suppress(OSError):  # another disk, or a file system without links
                os.link(path.resolve(), to)  # of a symbolic link, what it leads to
                return
        shutil.copyfile(path, to)
