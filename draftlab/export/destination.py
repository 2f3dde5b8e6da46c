"""The folder an export goes to: never a part of one, never in place of something else."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftlab.errors import UserError

_OURS = re.compile(
    r"config\.json|launch\.md|README\.md|model(-\d+-of-\d+)?\.safetensors"
    r"|model\.safetensors\.index\.json|.*\.gguf"
)
"""Names of the files that an export holds."""


def check_place(place: Path) -> None:
    """Refuses to write inside a file, or to replace anything but an earlier export.

    Args:
        place: the folder to write, absolute.
    """
    nearest = next(p for p in (place, *place.parents) if p.exists())
    if not nearest.is_dir():
        raise UserError("expected a folder to export into, found a file", where=nearest)
    if nearest != place:
        return
    names = sorted(p.name for p in place.iterdir())
    if foreign := [name for name in names if not _OURS.fullmatch(name)]:
        raise UserError(
            f"the folder holds what this export did not write: {', '.join(foreign[:5])}",
            where=place,
            do="give another folder, or an empty one",
        )
    if names and "launch.md" not in names:  # which every export has
        raise UserError("the folder holds a model that is no export", where=place)


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
