"""`draftlab store`: write new stores from recorded ones."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftlab.cli.console import STARTS_OVER, Debug, guard, monitor
from draftlab.errors import UserError
from draftlab.formatting import count_text

if TYPE_CHECKING:
    import numpy as np

    from draftlab.store.store import Store

store_app = typer.Typer(help="Merge, split and sample stores.", no_args_is_help=True)

FromStore = Annotated[
    str, typer.Argument(help="A recorded store: its folder or URL.", metavar="STORE")
]
Seed = Annotated[int, typer.Option(help="Seed of the choice of records.")]


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
        from draftlab.store import merge_split_sample as rewrite
        from draftlab.store.store import Store

        _check_folder(out)
        _report(rewrite.merge([Store.open(path) for path in stores], out, monitor))


@store_app.command()
def split(
    store: FromStore,
    out: Annotated[list[Path], typer.Option(help="Folder to write, once for each part, in order.")],
    shares: Annotated[
        str | None, typer.Option(help="Shares of the parts, such as 95,5; by default equal.")
    ] = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Split a store at random. All answers to a prompt are in the same part."""
    with guard(debug, STARTS_OVER):
        from draftlab.store import merge_split_sample as rewrite
        from draftlab.store.prompt_split import group_by_prompt, split_groups
        from draftlab.store.store import Store

        opened, weights = Store.open(store), _shares(shares, len(out))
        for folder in out:
            _check_folder(folder)
            rewrite.check_new_folder(folder)
        made_by = {"made_by": "split", "shares": weights, "seed": seed}
        prompts = group_by_prompt(opened.ids)
        parts = split_groups(prompts, weights, seed)
        _check_parts(out, parts, len(opened), int(prompts.max(initial=-1)) + 1)
        for number, (folder, part) in enumerate(zip(out, parts, strict=True)):
            _report(rewrite.select(opened, part, folder, {**made_by, "part": number}, monitor))


@store_app.command()
def sample(
    store: FromStore,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    records: Annotated[int, typer.Option(help="Number of records.", min=1)],
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Write a store with some records, chosen at random, in stored order."""
    with guard(debug, STARTS_OVER):
        import numpy as np

        from draftlab.store import merge_split_sample as rewrite
        from draftlab.store.prompt_split import split_groups
        from draftlab.store.store import Store

        _check_folder(out)
        opened = Store.open(store)
        if records > len(opened):
            raise UserError(
                f"expected at most the store's {len(opened):,} records, found {records:,}",
                where="--records",
                do="lower --records",
            )
        alone = np.arange(len(opened))
        chosen = split_groups(alone, [records, len(opened) - records], seed)[0]
        made_by = {"made_by": "sample", "records": records, "seed": seed}
        _report(rewrite.select(opened, chosen, out, made_by, monitor))


def _shares(text: str | None, parts: int) -> list[float]:
    if parts < 2:
        raise UserError(
            f"expected a folder for each part, found {parts}", where="--out", do="give --out twice"
        )
    if text is None:
        return [1.0] * parts
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if len(shares) != parts or not all(share > 0 for share in shares):
        raise UserError(
            f"expected {parts} positive shares, one for each --out, found {text!r}",
            where="--shares",
            do="separate them by commas: 95,5",
        )
    return shares


def _check_folder(out: Path) -> None:
    """Check that the folder of a new store is no URL, whose slashes a path has joined."""
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", str(out)):
        raise UserError(
            f"expected a folder on this machine, found the URL {str(out).replace(':/', '://', 1)}",
            where="--out",
            do="write a folder, and copy it to the URL",
        )


def _check_parts(out: list[Path], parts: list[np.ndarray], records: int, prompts: int) -> None:
    """Check all parts before the first one is written."""
    if len({folder.resolve() for folder in out}) < len(out):
        raise UserError(
            "expected a folder for each part, found the same one twice",
            where="--out",
            do="name as many different folders as there are parts",
        )
    do = "give it a larger share"
    if prompts < len(out):
        number = count_text(prompts, "prompt")
        do = f"write fewer parts: the records answer {number}, and each prompt is in one part"
    for folder, part in zip(out, parts, strict=True):
        if not len(part):
            raise UserError(
                f"expected records for every part, found none of {records:,} for {folder}",
                where="--shares",
                do=do,
            )


def _report(store: Store) -> None:
    counts = store.manifest.counts
    monitor.say(
        f"{store.address}: {count_text(counts.records, 'record')}, {counts.tokens:,} tokens, "
        f"{count_text(len(store.manifest.shards), 'shard')}"
    )
