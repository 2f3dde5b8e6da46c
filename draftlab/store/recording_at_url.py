"""A recording whose shards go to a URL: it uses a complete store there, and keeps others out."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.store.copied_manifest import read_copy
from draftlab.store.manifest import MANIFEST, Manifest
from draftlab.store.receipts import lock_folder
from draftlab.store.shard_files import METADATA, LocalShardFiles, ShardFiles


def adopt_manifest(folder: Path, files: ShardFiles, check: Callable[[Manifest], None]) -> bool:
    """Copy the manifest at a URL into a folder that has none.

    So a run whose `record.url` names the store of an equal recording, by another run, uses it.

    Args:
        check: raises a `UserError` if the manifest at the URL is of another recording.

    Returns:
        Whether it has been copied.

    Raises:
        UserError: the URL has the store of another recording, or does not answer.
    """
    if isinstance(files, LocalShardFiles) and files.folder.resolve() == folder.resolve():
        return False
    content, own = files.read_manifest(), folder / MANIFEST
    if content is None or (own.is_file() and own.read_bytes() == content):
        return False
    with tempfile.TemporaryDirectory(prefix=".shard-manifest.", dir=folder) as copy:
        manifest = read_copy(files, content, Path(copy))
        try:
            check(manifest)
        except UserError as error:
            raise UserError(
                f"the URL has another store: {error.what}",
                where=files.address,
                do="name another folder (record.url), or remove the store there",
            ) from None
        if own.is_file():
            return False
        for name in METADATA:
            if (Path(copy) / name).is_file():
                os.replace(Path(copy) / name, folder / name)
        return True


def lock_elsewhere(folder: Path, files: ShardFiles) -> AbstractContextManager[None]:
    """Return a lock of the shards' folder, if it is another one than the store's."""
    if isinstance(files, LocalShardFiles) and files.folder.resolve() != folder.resolve():
        files.folder.mkdir(parents=True, exist_ok=True)
        return lock_folder(files.folder)
    return nullcontext()


def claim_url(files: ShardFiles, plan: str, adopt: Callable[[], bool], monitor: Monitor) -> None:
    """Claim the URL at which shards are about to be written.

    Args:
        adopt: as `adopt_manifest`; it refuses what another run has completed since the last look.

    Raises:
        UserError: another recording has begun or has been completed there.
    """
    if former := files.claim(plan):
        monitor.say(
            f"store: a process ({former}) began this recording and did not complete it; it is "
            "recorded here, and that process ends with an error if it still runs"
        )
    try:
        adopt()
    except UserError:
        files.release()
        raise
