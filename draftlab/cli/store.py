"""`draftlab store merge`: write one store with the records of several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from draftlab.cli.console import STARTS_OVER, Debug, guard, monitor
from draftlab.errors import UserError
from draftlab.formatting import count_text

store_app = typer.Typer(help="Merge stores.", no_args_is_help=True)


@store_app.command()
def merge(
    stores: Annotated[
        list[str],
        typer.Argument(help="Recorded stores: folders or URLs.", metavar="STORE…"),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    debug: Debug = False,
) -> None:
    """Write a store with all records of several stores.

    Its shards are hard links where that is possible, which take no space.
    """
    with guard(debug, STARTS_OVER):
        from draftlab.store.merge import merge as merge_stores
        from draftlab.store.store import Store

        _check_folder(out)
        merged = merge_stores([Store.open(path) for path in stores], out, monitor)
        counts = merged.manifest.counts
        monitor.say(
            f"{merged.address}: {count_text(counts.records, 'record')}, {counts.tokens:,} tokens, "
            f"{count_text(len(merged.manifest.shards), 'shard')}"
        )


def _check_folder(out: Path) -> None:
    """Check that the folder of a new store is no URL, whose slashes a path has joined."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(out)):
        raise UserError(
            f"expected a folder on this machine, found the URL {str(out).replace(':/', '://', 1)}",
            where="--out",
            do="write a folder, and copy it to the URL",
        )
