"""`draftlab store merge`: write one store with the records of several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftlab.cli.console import Debug, monitor
from draftlab.cli.errors import STARTS_OVER, guard
from draftlab.errors import UserError
from draftlab.formatting import count_text

store_app = typer.Typer(help="Merge stores.", no_args_is_help=True)


@store_app.command()
def merge(
    stores: Annotated[
        list[str],
        typer.Argument(help="Recorded stores: folders or URLs.", metavar="STORE…"),
    ],
    out: Annotated[str, typer.Option(help="Folder to write.", metavar="FOLDER")],
    debug: Debug = False,
) -> None:
    """Write a store with all records of several stores.

    Its shards are hard links where that is possible, which take no space.
    """
    with guard(debug, STARTS_OVER):
        from draftlab.store.merge import merge as merge_stores
        from draftlab.store.store import Store

        if "://" in out:
            raise UserError(
                f"expected a folder on this machine, found the URL {out}",
                where="--out",
                do="write a folder, and copy it to the URL",
            )
        merged = merge_stores([Store.open(path) for path in stores], Path(out), monitor)
        counts = merged.manifest.counts
        monitor.say(
            f"{merged.address}: {count_text(counts.records, 'record')}, {counts.tokens:,} tokens, "
            f"{count_text(len(merged.manifest.shards), 'shard')}"
        )
