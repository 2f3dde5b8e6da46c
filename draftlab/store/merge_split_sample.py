"""Stores from stores: merged, split, sampled. States are copied bit for bit, never made again."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.files import (
    canonical_json,
    check_folder,
    save_tensors,
    sha256_file,
    sha256_text,
    write_json,
)
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Counts, Dropped, Manifest, Shard
from draftlab.store.store import Store


def merge(stores: Sequence[Store], folder: Path, monitor: Monitor) -> Store:
    """All records of stores of one identity, in order; shards are linked where the disk can.

    Raises:
        UserError: another identity, an id in two stores, a folder that is there.
    """
    first = stores[0]
    for store in stores[1:]:
        store.identity.check(first.identity, store.folder)
    _refuse_twins(stores)
    shards: list[Shard] = []
    with _new_folder(folder) as new:
        for store in stores:
            for shard in store.manifest.shards:
                file = f"shard-{len(shards):05d}.safetensors"
                _link(store.folder / shard.file, new / file)
                shards.append(shard.model_copy(update={"file": file}))
                monitor.progress("merge", len(shards), sum(len(s.manifest.shards) for s in stores))
        counts = [store.manifest.counts for store in stores]
        manifests = [store.manifest for store in stores]
        _finish(
            new,
            stores,
            shards,
            {"made_by": "merge"},
            Counts(
                records=sum(c.records for c in counts),
                tokens=sum(c.tokens for c in counts),
                loss_tokens=sum(c.loss_tokens for c in counts),
            ),
            Dropped(
                overlong=sum(m.dropped.overlong for m in manifests),
                nothing_to_predict=sum(m.dropped.nothing_to_predict for m in manifests),
            ),
            sum(m.truncated for m in manifests),
        )
    return Store.open(folder)


def select(
    store: Store,
    records: Sequence[int],
    folder: Path,
    made_by: dict[str, Any],
    monitor: Monitor,
    *,
    shard_tokens: int = 32_768,
) -> Store:
    """Some records of a store, in the order given, in shards of their own.

    Args:
        records: numbers, each at most once.
        made_by: what chose them; JSON values, kept in the manifest's settings.

    Raises:
        UserError: no records, or a folder that is there.
    """
    if not records:
        raise UserError("expected records to write, found none", where=folder)
    groups: list[list[int]] = []
    filled = shard_tokens
    for record in records:
        if filled + store.lengths[record] > shard_tokens:
            groups.append([])
            filled = 0
        groups[-1].append(record)
        filled += store.lengths[record]
    bad = {name: at for shard in store.manifest.shards for name, at in shard.not_finite.items()}
    shards, answers, tokens = [], 0, 0
    with _new_folder(folder) as new:
        for number, group in enumerate(groups):
            file = f"shard-{number:05d}.safetensors"
            found = [store.stored(record) for record in group]
            lengths = [store.lengths[record] for record in group]
            tensors = {name: torch.cat([t[name] for t in found]) for name in found[0]}
            tensors["offsets"] = torch.tensor([0, *lengths]).cumsum(0)
            save_tensors(tensors, new / file)
            ids = [store.ids[record] for record in group]
            shards.append(
                Shard(
                    file=file,
                    ids=ids,
                    lengths=lengths,
                    temperatures=[store.temperature(record) for record in group],
                    batches=[],
                    bytes=(new / file).stat().st_size,
                    sha256=sha256_file(new / file),
                    not_finite={name: bad[name] for name in ids if name in bad},
                )
            )
            answers += int((tensors["spans"] > 0).sum())
            tokens += sum(lengths)
            monitor.progress("store", number + 1, len(groups))
        counts = Counts(records=len(records), tokens=tokens, loss_tokens=answers)
        _finish(new, [store], shards, made_by, counts, Dropped(), 0)
    return Store.open(folder)


def _refuse_twins(stores: Sequence[Store]) -> None:
    counted = Counter(name for store in stores for name in store.ids)
    name, count = counted.most_common(1)[0]
    if count > 1:
        places = [str(store.folder) for store in stores if name in store.ids]
        raise UserError(
            f"expected every record in one store, found {name!r} in {' and '.join(places)}",
            do="leave one of the stores out, or record its conversations under other ids",
        )


def check_new(folder: Path) -> None:
    """Refuses a folder that has something in it, and one that cannot be made.

    Raises:
        UserError: which of the two.
    """
    check_folder(folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError("expected a new folder to write to, found one with files", where=folder)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder that gets its name when it is whole."""
    check_new(folder)
    new = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
        os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _link(source: Path, to: Path) -> None:
    try:
        os.link(source, to)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, to)


def _finish(
    folder: Path,
    stores: Sequence[Store],
    shards: list[Shard],
    made_by: dict[str, Any],
    counts: Counts,
    dropped: Dropped,
    truncated: int,
) -> None:
    sources = [store.manifest.samples_sha256 for store in stores]
    identities = canonical_json([sources, made_by, [shard.ids for shard in shards]])
    manifest = Manifest(
        complete=True,
        identity=stores[0].identity,
        samples_sha256=sha256_text(identities),
        settings={**made_by, "sources": [store.manifest.settings for store in stores]},
        counts=counts,
        dropped=dropped,
        truncated=truncated,
        shards=shards,
    )
    write_json(folder / MANIFEST, manifest.dump())
