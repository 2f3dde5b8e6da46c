"""The manifest of a store at a URL: copies of it and of its columns on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.shard_cache import ShardCache
from draftlab.store.shard_files import (
    METADATA,
    RemoteShardFiles,
    ShardFiles,
    open_shard_files,
)
from draftlab.store.urls import address_of

KEPT_S = 7 * 24 * 3600
"""Time after its last use for which a copy is kept, in seconds."""


def locate_store(address: Path | str, url: str | None) -> tuple[Path, ShardFiles]:
    """Return the local folder of a store's manifest, and the files of its shards.

    Args:
        address: the store's folder or URL.
        url: where the shards of a folder are; None: in it.

    Raises:
        UserError: as `copy_metadata`; or the address is none.
    """
    try:
        place = address_of(address)
    except ValueError as error:
        raise UserError(str(error), do="name a store's folder or URL") from None
    if isinstance(place, Path):
        return place, open_shard_files(place, url)
    files = RemoteShardFiles(place)
    return copy_metadata(files, files.cache), files


def copy_metadata(files: RemoteShardFiles, cache: ShardCache) -> Path:
    """Return the folder of this machine's copy of a manifest at a URL, with its columns.

    Its name is the SHA-256 of the manifest, which has the hashes of the columns.

    Raises:
        UserError: there is no store, its files do not fit each other, or the URL does not answer.
    """
    content = files.read_manifest()
    if content is None:
        files.remote.check_bucket()
        raise UserError(
            "expected a store, found no manifest.json",
            where=files.where(MANIFEST),
            do="check the URL; a recording copies its manifest there at its beginning and its end",
        )
    copies = cache.folder / "manifests"
    copies.mkdir(parents=True, exist_ok=True, mode=0o700)
    _remove_old(copies)
    copy = copies / hashlib.sha256(content).hexdigest()
    if not copy.is_dir():
        with tempfile.TemporaryDirectory(prefix="new.", dir=copies) as new:
            read_copy(files, content, Path(new))
            with suppress(OSError):  # another process was faster
                os.rename(new, copy)
                Path(new).mkdir()  # for the context to remove
    os.utime(copy)
    return copy


def read_copy(files: ShardFiles, content: bytes, folder: Path) -> Manifest:
    """Copy a manifest and its columns to an empty folder; return it after its hashes are checked.

    Raises:
        UserError: it is damaged; the error names the URL.
    """
    try:
        (folder / MANIFEST).write_bytes(content)
        fields = read_json(folder / MANIFEST, kind="store's manifest.json")
        for name in METADATA:
            key = f"{name.partition('.')[0]}_sha256"  # the manifest has the hash of what it needs
            if name != MANIFEST and isinstance(fields, dict) and fields.get(key):
                files.copy_metadata(name, folder / name)
        return Manifest.read(folder / MANIFEST)
    except OSError as error:
        raise UserError(
            f"the manifest cannot be copied to this machine: {error}",
            where=folder,
            do="free disk space",
        ) from None
    except UserError as error:
        if Path(error.where).parent != folder:
            raise
        where = files.where(Path(error.where).name)
        raise UserError(error.what, where=where, do=error.do) from None


def _remove_old(copies: Path) -> None:
    for path in copies.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
