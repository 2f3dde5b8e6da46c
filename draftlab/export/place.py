"""The folder an export goes to: never a part of one, never in place of something else."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftlab.base import UserError


def check_place(place: Path, files: frozenset[str]) -> None:
    """Refuses to write inside a file, or to replace anything but an earlier export.

    Args:
        place: the folder to write, absolute.
        files: the names that an export of this layout holds.
    """
    nearest = next(p for p in (place, *place.parents) if p.exists())
    if not nearest.is_dir():
        raise UserError("expected a folder to export into, found a file", where=nearest)
    if nearest == place and (foreign := sorted({p.name for p in place.iterdir()} - files)):
        raise UserError(
            f"the folder holds what this export did not write: {', '.join(foreign[:5])}",
            where=place,
            do="give another folder, or an empty one",
        )


@contextmanager
def whole_folder(place: Path) -> Iterator[Path]:
    """Yields an empty sibling folder; on success it is renamed onto `place`.

    An older folder at `place` is moved aside for the rename and deleted after it: whatever happens,
    one of the two is there whole.
    """
    temporary = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    aside = place.with_name(f".{place.name}.{os.getpid()}.old")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"the folder cannot be made: {error.strerror}", where=place) from None
    try:
        yield temporary
        if place.exists():
            place.rename(aside)
        try:
            temporary.rename(place)
        except OSError:
            if aside.exists():
                aside.rename(place)
            raise
        parent = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
