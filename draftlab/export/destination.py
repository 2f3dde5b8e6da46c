"""The folder that an export is written to: written atomically, and never over other files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftlab.errors import UserError

_EXPORT_FILES = re.compile(
    r"(config|calibration|sts|sps)\.json|launch\.md|README\.md"
    r"|model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|.*\.gguf"
)
"""Names of the files that an export holds."""


def check_destination(destination: Path) -> None:
    """Raise a `UserError` if a folder (absolute) cannot be created or is not an earlier export."""
    nearest = next(p for p in (destination, *destination.parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(
            "expected a folder to export into, found a file",
            where=nearest,
            do="name a folder: --out FOLDER",
        )
    if nearest != destination:
        return
    names = sorted(p.name for p in destination.iterdir())
    foreign = [name for name in names if not _EXPORT_FILES.fullmatch(name)]
    if foreign or (names and "launch.md" not in names):  # every export has one
        raise UserError(
            "expected a new folder or an earlier export, found "
            + (", ".join(foreign[:5]) or "a model without launch.md"),
            where=destination,
            do="give another folder, or an empty one",
        )


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty sibling folder, and rename it to `path` on success.

    An older folder at `path` is renamed before and deleted afterwards, so that one of the two is
    complete on disk at any time.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be created: {error.strerror}",
            where=path,
            do="name a folder that you can write to, or change its permissions",
        ) from None
    try:
        yield temporary
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        parent = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
