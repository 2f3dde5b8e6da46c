"""The folder of an export or a push, which never replaces other files."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from draftlab.errors import UserError
from draftlab.export.gguf import FILE
from draftlab.export.serving_tables import CALIBRATION, STS
from draftlab.export.weight_files import DELTA, INDEX, WEIGHTS, weight_files

_MARK = "launch.md"
"""A file that every export has."""
_EXPORT_FILES = {"config.json", "README.md", _MARK, CALIBRATION, STS, WEIGHTS, DELTA, INDEX, FILE}


def check_destination(
    destination: Path, kind: str = "earlier export", more: Collection[str] = ()
) -> None:
    """Check that a folder can be created, or has only files that draftlab writes into one.

    Args:
        destination: an absolute path.
        kind: what may be replaced, for the error.
        more: names of files beside those of an export.

    Raises:
        UserError: it cannot be created, or has other content.
    """
    nearest = next(p for p in (destination, *destination.parents) if p.exists())
    if not nearest.is_dir():
        raise UserError(
            "expected a folder to write, found a file",
            where=nearest,
            do="name a folder: --out FOLDER",
        )
    if nearest != destination:
        return
    paths = sorted(destination.iterdir())
    known = {*_EXPORT_FILES, *more}
    if (destination / INDEX).is_file():
        with suppress(UserError):  # of a damaged index no shard is known
            known |= {
                file.name
                for file in weight_files(destination)
                if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", file.name)
            }
    foreign = [p.name for p in paths if p.name not in known or p.is_symlink() or not p.is_file()]
    if foreign or (paths and destination / _MARK not in paths):
        raise UserError(
            f"expected a new folder or an {kind}, found "
            + (", ".join(foreign[:20]) or f"a model without {_MARK}")
            + f" and {len(foreign) - 20:,} more" * (len(foreign) > 20),
            where=destination,
            do="name another folder with --out, or move these files",
        )
