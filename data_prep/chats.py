"""Public chat data sets → one JSONL of conversations, with counts of everything left out.

    python data_prep/chats.py ultrachat:100000 magpie:50000 my.jsonl --out prompts.jsonl
    python data_prep/chats.py --list

A SOURCE is a name of `--list`, a Hub id (org/name), or a local file (.jsonl, .json, .parquet), with
:N for a quota. Rows are streamed: nothing is downloaded whole. A conversation is kept once: of
those that begin with the same question the first. The file is what recipes read as prompts.source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError

sys.path.insert(0, str(Path(__file__).parents[1]))
from draftlab.errors import UserError
from draftlab.files import atomic_path, write_json
from draftlab.text.chat_rows import Chat, Dropped, read_row

KNOWN = {
    "sharegpt": ("Aeala/ShareGPT_Vicuna_unfiltered", "train"),
    "ultrachat": ("HuggingFaceH4/ultrachat_200k", "train_sft"),
    "magpie": ("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "train"),
    "perfectblend": ("mlabonne/open-perfectblend", "train"),
    "openthoughts": ("open-thoughts/OpenThoughts-114k", "train"),
    "toolcalls": ("Salesforce/xlam-function-calling-60k", "train"),
    "dolly": ("databricks/databricks-dolly-15k", "train"),
    "squad": ("rajpurkar/squad", "train"),
}
TRIES = 5
FORMATS = (".jsonl", ".json", ".parquet")
Rows = Callable[[int], Iterable[Any]]
"""The rows of a source from a number on."""


@dataclass(frozen=True)
class Source:
    """Where rows come from, and how many conversations are taken at most."""

    name: str
    path: str
    split: str
    quota: int | None


def parse_source(text: str) -> Source:
    """`name`, `org/name`, `org/name@split` or a file, with `:quota`.

    Raises:
        UserError: none of them.
    """
    name, colon, number = text.rpartition(":")
    if not colon or not number.isdigit():
        name, number = text, ""
    quota = int(number) if number else None
    if quota == 0:
        raise UserError("expected a quota of 1 or more, found 0", where=text)
    if name in KNOWN:
        return Source(name, *KNOWN[name], quota)
    path = Path(name)
    if path.suffix in FORMATS:
        if not path.is_file():
            raise UserError("expected a data set's file, found none", where=path)
        return Source(path.name, name, "train", quota)
    hub, _, split = name.partition("@")
    if hub.count("/") != 1:
        raise UserError(
            f"expected a data set's name, Hub id or file, found {name!r}",
            do=f"known names: {', '.join(KNOWN)}; files end in {', '.join(FORMATS)}",
        )
    return Source(hub, hub, split or "train", quota)


def rows_of(source: Source) -> Rows:
    """Stream a source: the Hub and Parquet through `datasets`, JSON as it is.

    `datasets` gives all rows of a JSON file one schema, and refuses those of another.
    """
    suffix = Path(source.path).suffix
    if suffix in (".json", ".jsonl"):
        return lambda start: islice(_json_rows(Path(source.path)), start, None)

    def rows(start: int) -> Iterable[Any]:
        from datasets import load_dataset

        files = {"data_files": source.path} if suffix == ".parquet" else {}
        kind = "parquet" if files else source.path
        try:
            yield from load_dataset(kind, split=source.split, streaming=True, **files).skip(start)
        except ValueError as error:  # pyarrow's errors, and an unknown split
            raise UserError(
                f"expected rows of split {source.split!r}, found: {error}",
                where=source.path,
                do="fetch the data set again, or name another split: org/name@split",
            ) from None

    return rows


def _json_rows(path: Path) -> Iterator[Any]:
    """Yield the items of one JSON list, or lines of JSON; a line that is none as its bytes."""
    with open(path, "rb") as file:
        if path.suffix == ".json":
            try:
                rows = json.load(file)
                found = f"a {type(rows).__name__}"
            except ValueError as error:
                rows, found = None, f"other text: {error}"
            if not isinstance(rows, list):
                do = "give a file with a JSON object on each line the ending .jsonl"
                raise UserError(f"expected a list in JSON, found {found}", where=path, do=do)
            yield from rows
            return
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                yield line


def steadily(rows: Rows, say: Callable[[str], None], pause: float = 2.0) -> Iterator[Any]:
    """Yield all rows; a dropped connection is made again and continues after the last row.

    Raises:
        UserError: it dropped `TRIES` times without a row in between.
    """
    done = failed = 0
    while True:
        try:
            for row in rows(done):
                yield row
                done, failed = done + 1, 0
            return
        except (OSError, EOFError, HTTPError) as error:  # the Hub's client has errors of its own
            failed += 1
            if failed == TRIES:
                raise UserError(
                    f"the source failed {TRIES} times at row {done:,}: {error}",
                    do="the same command starts anew; a quota (:N) below this row needs no more",
                ) from None
            say(f"row {done:,}: {type(error).__name__}: {error}; trying again")
            time.sleep(pause * failed)


def conversations(
    source: Source, rows: Iterable[Any], seen: set[bytes], counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield lines of a source up to its quota; dropped rows are counted by reason.

    Args:
        seen: of all sources, what conversations began with.
        counts: gets `rows`, `kept` and reasons.
    """
    for number, row in enumerate(rows):
        if source.quota is not None and counts["kept"] >= source.quota:
            return
        counts["rows"] += 1
        try:
            if isinstance(row, bytes):
                raise Dropped("a line that is no JSON" if row.strip() else "an empty line")
            chat = read_row(row)
            _first_of_its_kind(chat, seen)
        except Dropped as reason:
            counts[str(reason)] += 1
            continue
        counts["kept"] += 1
        yield {
            "id": f"{source.name}-{number}",
            "messages": chat.messages,
            "source": source.name,
            **({"tools": chat.tools} if chat.tools else {}),
        }


def _first_of_its_kind(chat: Chat, seen: set[bytes]) -> None:
    asked = next(m["content"] for m in chat.messages if m["role"] == "user")
    digest = hashlib.blake2b(" ".join(asked.split()).encode(), digest_size=8).digest()
    if digest in seen:
        raise Dropped("a question that was there before")
    seen.add(digest)


def prepare(
    sources: list[Source],
    out: Path,
    *,
    say: Callable[[str], None],
    opened: Callable[[Source], Rows] = rows_of,
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
        raise UserError(f"expected each source once, found {twice[0]!r} twice")
    seen: set[bytes] = set()
    result: dict[str, dict[str, int]] = {}
    with atomic_path(out) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for source in sources:
            counts: Counter[str] = Counter(rows=0, kept=0)
            for line in conversations(source, steadily(opened(source), say), seen, counts):
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            result[source.name] = dict(counts)
            say(f"{source.name}: {counts['kept']:,} of {counts['rows']:,} rows kept")
            for reason, count in counts.most_common():
                if reason not in ("rows", "kept"):
                    say(f"  dropped {count:,}: {reason}")
        if not any(counts["kept"] for counts in result.values()):
            raise UserError(
                "expected conversations, found none that could be kept",
                where=", ".join(result),
                do="give files of chats; the lines above say why each row was dropped",
            )
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
