"""Public chat data sets → one JSONL of conversations, with counts of everything left out.

    python data_prep/chats.py ultrachat:100000 magpie:50000 my.jsonl --out prompts.jsonl
    python data_prep/chats.py --list

A SOURCE is a name of `--list`, a Hub id (org/name), or a local file (.jsonl, .json, .parquet), with
:N for a quota. Rows are streamed: nothing is downloaded whole. A conversation is kept once: of
those that begin with the same question the first. The file is what recipes read as prompts.source.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from draftlab.errors import UserError
from draftlab.files import write_json
from draftlab.text.data_sets import FORMATS, KNOWN, Source, hub_source, write_sources


def parse_source(text: str) -> Source:
    """`name`, `org/name[/config][@split]` or a file, with `:quota`.

    Raises:
        UserError: none of them.
    """
    name, colon, number = text.rpartition(":")
    if not colon or not number.isdigit():
        name, number = text, ""
    quota = int(number) if number else None
    if quota == 0:
        raise UserError(
            "expected a quota of 1 or more, found 0", where=text, do="leave the source out"
        )
    if (source := hub_source(name)) is not None:
        return replace(source, quota=quota)
    path = Path(name)
    if path.suffix not in FORMATS:
        raise UserError(
            f"expected a data set's name, Hub id or file, found {name!r}",
            do=f"known names: {', '.join(KNOWN)}; files end in {', '.join(FORMATS)}",
        )
    if not path.is_file():
        raise UserError("expected a data set's file, found none", where=path, do="name a file")
    return Source(path.name, name, quota=quota)


def prepare(
    sources: list[Source], out: Path, *, say: Callable[[str], None]
) -> dict[str, dict[str, int]]:
    """Write the sources' conversations one after the other; return the counts of each.

    `out` with .counts.json in place of its ending gets the counts too.

    Raises:
        UserError: a source that cannot be read or would be replaced, or nothing that was kept.
    """
    counted = out.with_suffix(".counts.json")
    for path in map(Path, (source.path for source in sources)):
        if path.exists() and path.resolve() in (out.resolve(), counted.resolve()):
            raise UserError(
                "expected a new file to write, found a source", where=path, do="change --out"
            )
    twice = [name for name, count in Counter(s.name for s in sources).items() if count > 1]
    if twice:
        raise UserError(
            f"expected each source once, found {twice[0]!r} twice",
            do="name it once, with its quota",
        )
    result = write_sources(sources, out, say=say)
    write_json(counted, result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="name, Hub id or file, :quota")
    parser.add_argument("--out", type=Path, help="JSONL to write")
    parser.add_argument("--list", action="store_true", help="print the known names")
    options = parser.parse_args()
    if options.list:
        for name, (path, split) in KNOWN.items():
            print(f"{name:14} {path} ({split})")
        return
    if not options.sources or options.out is None:
        parser.error("expected sources and --out")
    try:
        prepare([parse_source(text) for text in options.sources], options.out, say=print)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
