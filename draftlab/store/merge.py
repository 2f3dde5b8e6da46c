"""Merge stores into one. States are copied bit for bit, never recomputed."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import (
    canonical_json,
    check_folder,
    sha256_text,
)
from draftlab.progress import Monitor
from draftlab.store.columns import Texts
from draftlab.store.manifest import (
    MANIFEST,
    Counts,
    Dropped,
    Manifest,
    template_arguments_setting,
)
from draftlab.store.record_index import RecordIndex
from draftlab.store.shard import Shard, Shards, ShardTable, shard_file
from draftlab.store.store import Store

_NUMBER = re.compile(r"~([0-9]+)(?:#[0-9]+)?\Z")
"""Finds the number of the answer at the end of a record's id."""


def merge(stores: Sequence[Store], folder: Path, monitor: Monitor) -> Store:
    """Write a store with all records of stores of one identity, in order.

    Shards are hard links where the file system supports them. Where prompts were recorded again
    with other template arguments, the records of the later store are further answers to them.

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
    indices = _distinct_ids(stores, monitor)
    total, number = sum(len(manifest.shards) for manifest in manifests), 0
    with _new_folder(folder) as new:
        for store in stores:
            for shard in store.manifest.shards:
                _copy_shard(store, shard, new / shard_file(number))
                number += 1
                monitor.progress("merge", number, total)
        index = RecordIndex.join(indices)
        table = ShardTable.join([one.written for one in manifests], [len(one) for one in stores])
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
            counts=Counts(**_sums([manifest.counts for manifest in manifests])),
            dropped=Dropped(**_sums([manifest.dropped for manifest in manifests])),
            truncated=sum(manifest.truncated for manifest in manifests),
        )
        manifest.completed(table).write(new)
    return Store.open(folder)


def _sums(models: Sequence[Counts] | Sequence[Dropped]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for model in models:
        total.update(model.model_dump())
    return dict(total)


def _distinct_ids(stores: Sequence[Store], monitor: Monitor) -> list[RecordIndex]:
    """Return the indices of the stores, in which no two records have one id; raise a `UserError`
    if stores share one, and not merely the prompts of other template arguments.
    """
    all_ids: list[Sequence[str]] = []
    for number, store in enumerate(stores):
        ids, own = set(store.ids), store.manifest.template_arguments
        sharing = [one for one in stores[:number] if not ids.isdisjoint(one.ids)]
        shared = [one.manifest.template_arguments for one in sharing]
        if not sharing or own is None or any(m is None or any(a in own for a in m) for m in shared):
            all_ids.append(store.ids)
            continue
        numbers = (_NUMBER.search(id_) for earlier in all_ids for id_ in earlier)
        first = 1 + max((int(found[1]) for found in numbers if found), default=0)
        all_ids.append([_further(id_, first, ids) for id_ in store.ids])
        monitor.say(
            f"merge: {store.address} has records of prompts of {sharing[0].address} with other "
            f"template arguments; they are further answers, with ids such as {all_ids[-1][0]!r}"
        )
    id_, count = Counter(id_ for ids in all_ids for id_ in ids).most_common(1)[0]
    if count > 1:
        folders = [str(one.address) for one, ids in zip(stores, all_ids, strict=True) if id_ in ids]
        raise UserError(
            f"expected every record in one store, found {id_!r} in {' and '.join(folders)}",
            do="leave one of the stores out, or record its conversations under other ids",
        )
    columns = [Texts.of(ids) for ids in all_ids]
    return [
        replace(store.manifest.index, id_bytes=texts.utf8, id_ends=texts.ends)
        for store, texts in zip(stores, columns, strict=True)
    ]


def _all_modes(stores: Sequence[Store]) -> list[dict[str, Any]] | None:
    """Return the different template arguments of all stores; None: too many to list."""
    found: list[dict[str, Any]] = []
    for store in stores:
        if (modes := store.manifest.template_arguments) is None:
            return None
        found += [one for one in modes if one not in found]
    return found


def _further(id_: str, first: int, ids: set[str]) -> str:
    """Return a record's id as that of a later answer; a part of a conversation remains its part.

    Later answers are numbered from `first` on; `ids` are all of the store.
    """
    conversation, _, part = id_.rpartition("#")
    if conversation in ids and re.fullmatch("[0-9]+", part):
        return f"{_further(conversation, first, ids)}#{part}"
    prompt, _, number = id_.rpartition("~")
    if prompt and re.fullmatch("[0-9]+", number):
        return f"{prompt}~{first + int(number)}"
    return f"{id_}~{first}"


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder`, which must be new, on success."""
    check_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            "expected a new folder to write to, found one with files",
            where=folder,
            do="name another folder: --out FOLDER",
        )
    for parent in folder.resolve().parents:
        if (parent / MANIFEST).is_file():
            raise UserError(
                f"expected a folder outside of all stores, found one inside the store {parent}",
                where=folder,
                do="name a folder beside it: --out FOLDER",
            )
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
