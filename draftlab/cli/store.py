"""The verbs of `draftlab store`: new stores made of recorded ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from draftlab.cli.console import Debug, guard, monitor

if TYPE_CHECKING:
    from draftlab.store.store import Store

store_app = typer.Typer(help="Merge, split and sample stores.", no_args_is_help=True)

FromStore = Annotated[Path, typer.Argument(help="A recorded store.", metavar="STORE")]
Seed = Annotated[int, typer.Option(help="Of the choice of records.")]
STARTS_ANEW = "nothing was written, and the same command starts anew"


@store_app.command()
def merge(
    stores: Annotated[list[Path], typer.Argument(help="Recorded stores.", metavar="STORE…")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    debug: Debug = False,
) -> None:
    """All records of several stores; their shards are linked, which takes no space."""
    with guard(debug, STARTS_ANEW):
        from draftlab.store import merge_split_sample as rewrite
        from draftlab.store.store import Store

        _told(rewrite.merge([Store.open(path) for path in stores], out, monitor))


@store_app.command()
def split(
    store: FromStore,
    out: Annotated[list[Path], typer.Option(help="Folder to write; one for each part, in order.")],
    shares: Annotated[
        str | None, typer.Option(help="Of the parts, such as 95,5; default: equal ones.")
    ] = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Parts of a store, every prompt with all its answers in just one of them, dealt at random."""
    with guard(debug, STARTS_ANEW):
        from draftlab.store import merge_split_sample as rewrite
        from draftlab.store.prompt_split import group_by_prompt, split_groups
        from draftlab.store.store import Store

        opened, weights = Store.open(store), _shares(shares, len(out))
        for folder in out:
            rewrite.check_new_folder(folder)
        made_by = {"made_by": "split", "shares": weights, "seed": seed}
        prompts = group_by_prompt(opened.ids)
        parts = split_groups(prompts, weights, seed)
        _check_parts(out, parts, len(opened), len(prompts))
        for number, (folder, part) in enumerate(zip(out, parts, strict=True)):
            _told(rewrite.select(opened, part, folder, {**made_by, "part": number}, monitor))


@store_app.command()
def sample(
    store: FromStore,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    records: Annotated[int, typer.Option(help="How many.", min=1)],
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """Some of a store's records, chosen at random, in stored order."""
    with guard(debug, STARTS_ANEW):
        from draftlab.errors import UserError
        from draftlab.store import merge_split_sample as rewrite
        from draftlab.store.prompt_split import split_groups
        from draftlab.store.store import Store

        opened = Store.open(store)
        if records > len(opened):
            raise UserError(
                f"expected at most the store's {len(opened):,} records, found {records:,}",
                where="--records",
            )
        each = [[record] for record in range(len(opened))]
        chosen = split_groups(each, [records, len(opened) - records], seed)[0]
        made_by = {"made_by": "sample", "records": records, "seed": seed}
        _told(rewrite.select(opened, chosen, out, made_by, monitor))


def _shares(text: str | None, parts: int) -> list[float]:
    from draftlab.errors import UserError

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
            do="write them with commas: 95,5",
        )
    return shares


def _check_parts(out: list[Path], parts: list[list[int]], records: int, prompts: int) -> None:
    """Refuses what would fail when some parts are written already."""
    from draftlab.errors import UserError

    if len({folder.resolve() for folder in out}) < len(out):
        raise UserError("expected a folder for each part, found one twice", where="--out")
    do = "give it a larger share"
    if prompts < len(out):
        few = "one prompt" if prompts == 1 else f"{prompts:,} prompts"
        do = f"ask for fewer parts: all records answer {few}, and each prompt's stay together"
    for folder, part in zip(out, parts, strict=True):
        if not part:
            raise UserError(
                f"expected records for every part, found none of {records:,} for {folder}",
                where="--shares",
                do=do,
            )


def _told(store: Store) -> None:
    from draftlab.formatting import count_text

    counts = store.manifest.counts
    monitor.say(
        f"{store.folder}: {count_text(counts.records, 'record')}, {counts.tokens:,} tokens, "
        f"{count_text(len(store.manifest.shards), 'shard')}"
    )
