"""Checks that a store is complete, from its manifest and one listing of its shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftlab.errors import UserError
from draftlab.files import known_sha256
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.shard import ShardSizes
from draftlab.store.shard_files import ShardFiles, open_shard_files
from draftlab.store.window import num_kept_shards

DAMAGED_SHARD = "the shard is damaged:"
RECORD_AGAIN = "record again into this folder: only missing shards are computed"


def check_store(folder: Path, url: str | None = None, since_ns: int | None = None) -> bool:
    """Check that a store is complete, as `Store.open` does; one with record.online always is.

    Of a store that is a window only the shards that stay have to be there.

    Args:
        url: where the shards are (`record.url`); None: in the folder.
        since_ns: of shards on this machine whose files changed after this time, in nanoseconds, the
            hashes are compared, too.

    Returns:
        Whether there were such shards.

    Raises:
        UserError: a shard is missing, or has another size or hash than in the manifest.
    """
    manifest = Manifest.read(folder / MANIFEST)
    if manifest.online:
        return False
    files = open_shard_files(folder, url)
    listing = files.list()
    check_complete(files, manifest, listing)
    if since_ns is None or not files.is_local:
        return False
    changed = np.flatnonzero(listing.first_modified_ns(num_kept_shards(manifest)) > since_ns)
    for shard in map(manifest.shards.__getitem__, changed.tolist()):
        if (digest := known_sha256(folder / shard.file)) != shard.sha256:
            raise UserError(
                f"{DAMAGED_SHARD} expected SHA-256 {shard.sha256}, found {digest}",
                where=files.where(shard.file),
                do=f"remove this shard and {RECORD_AGAIN}",
            )
    return bool(len(changed))


def check_complete(files: ShardFiles, manifest: Manifest, listing: ShardSizes) -> None:
    """Check that a store is complete and that the shards that stay have their sizes.

    Args:
        listing: of the files.

    Raises:
        UserError: its recording was interrupted, it holds no states, or a shard is missing or has
            another size than in the manifest.
    """
    if not manifest.complete:
        raise UserError(
            "the recording of this store was interrupted",
            where=files.address,
            do="run the same command again: recording resumes after the last whole shard",
        )
    if manifest.online:
        raise UserError(
            "this store holds no states: training computes them on demand",
            where=files.address,
            do="record with record.online: false to inspect the states",
        )
    num_kept = num_kept_shards(manifest)
    sizes = listing.first(num_kept)
    for number in np.flatnonzero(sizes != manifest.written.bytes[:num_kept])[:1].tolist():
        shard, do = manifest.shards[number], RECORD_AGAIN
        if files.is_local and (sizes < 0).all():
            do += "; or name the URL at which its run has the shards (record.url in its recipe)"
        raise UserError(shard.problem(int(sizes[number])), where=files.where(shard.file), do=do)
