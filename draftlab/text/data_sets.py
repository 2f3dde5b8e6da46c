"""Public chat data sets of the Hub as files of conversations, with counts of everything left out.

Rows are streamed, so that nothing is downloaded whole. A conversation is kept once: of those that
begin with the same question the first. A data set's file is kept in the cache with the commit that
it was read from, and later runs of this machine read that file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError

from draftlab.errors import UserError
from draftlab.files import (
    atomic_path,
    cache_folder,
    canonical_json,
    parse_json,
    sha256_text,
    write_json,
)
from draftlab.formatting import pip_install
from draftlab.progress import Monitor
from draftlab.target_model.locate import hub_answers
from draftlab.text.chat_rows import Dropped, read_row
from draftlab.text.settings import PromptSettings

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
FORMATS = (".jsonl", ".json", ".parquet")
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+))?(?:@([\w.-]+))?")
_OTHERWISE = (
    "the Hub's own copy in Parquet (prompts.revision=refs/convert/parquet), or a JSONL file that "
    "you make of its rows"
)


@dataclass(frozen=True)
class Source:
    """Where rows come from, and how many conversations are taken at most.

    Attributes:
        path: a data set's id on the Hub, or a file.
        config: one of several data sets of that id; None: the default one.
    """

    name: str
    path: str
    split: str = "train"
    config: str | None = None
    revision: str | None = None
    quota: int | None = None


def hub_source(text: str) -> Source | None:
    """Parse `name` of `KNOWN`, or `org/name[/config][@split]`; return None for anything else."""
    if Path(text).expanduser().exists() or text.endswith(FORMATS):
        return None
    if text in KNOWN:
        path, split = KNOWN[text]
        return Source(text, path, split)
    found = _HUB.fullmatch(text)
    if found is None or text.startswith("."):
        return None
    path, config, split = found.groups()
    return Source(path, path, split or "train", config)


def rows_of(source: Source, alternative: str = "") -> Iterator[Any]:
    """Stream a source: the Hub and Parquet through `datasets`, JSON as it is.

    `datasets` connects again where a connection drops. It gives all rows of a JSON file one schema,
    and refuses those of another. A line of a JSONL file that is no JSON comes as its bytes.

    Args:
        alternative: what a user can do without the Hub or the package, of a data set to be kept.

    Raises:
        UserError: the rows cannot be read.
    """
    path = Path(source.path)
    if path.suffix in (".json", ".jsonl"):
        yield from _json_rows(path)
        return
    datasets = datasets_package(source.path, alternative)
    try:
        if path.suffix == ".parquet":
            builder = datasets.load_dataset_builder("parquet", data_files=source.path)
        else:
            builder = datasets.load_dataset_builder(
                source.path, source.config, revision=source.revision
            )
        _check_format(builder, source)
        if alternative:  # it is small: kept, it is read again without a network
            builder.download_and_prepare()
            yield from builder.as_dataset(source.split)
        else:
            yield from builder.as_streaming_dataset(source.split)
    except (
        *(ValueError, RuntimeError, OSError, EOFError, HTTPError),
        datasets.exceptions.DatasetsError,
    ) as error:
        # No network, a damaged file, an unknown split or configuration, a script, which none runs.
        raise UserError(
            f"expected rows of split {source.split!r}, found: {error}",
            where=source.path,
            do=alternative
            or "name another split or configuration, org/name/configuration@split; or "
            f"{_OTHERWISE}",
        ) from None


def datasets_package(where: str | Path, alternative: str = "") -> Any:
    """Return the optional package `datasets`; raise a `UserError` if it is not installed.

    Args:
        alternative: what a user can do without it.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            "expected the package datasets, found none",
            where=where,
            do="; or ".join(filter(None, (pip_install("suites"), alternative))),
        ) from None
    return datasets


def _check_format(builder: Any, source: Source) -> None:
    """Refuse formats whose reading may run what is in the files, such as pickle."""
    kind = type(builder).__module__.rpartition(".")[2]
    if kind not in ("parquet", "json", "cache"):  # of what `datasets` has kept, as Arrow
        raise UserError(
            f"expected a data set of Parquet or JSON files, found one of the kind {kind!r}",
            where=source.path,
            do=f"name {_OTHERWISE}",
        )


def _json_rows(path: Path) -> Iterator[Any]:
    """Yield the items of one JSON list, or lines of JSON; a line that is none as its bytes."""
    with open(path, "rb") as file:
        if path.suffix == ".json":
            try:
                rows = parse_json(file.read())
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
                yield parse_json(line)
            except ValueError:
                yield line


def conversations(
    source: Source, rows: Iterable[Any], seen: set[bytes] | None, counts: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield lines of a source up to its quota; dropped rows are counted by reason.

    Args:
        seen: of all sources, what conversations began with; None: they may repeat.
        counts: gets `rows`, `kept` and reasons.
    """
    for number, row in enumerate(rows):
        if source.quota is not None and counts["kept"] >= source.quota:
            return
        counts["rows"] += 1
        try:
            if isinstance(row, bytes):
                raise Dropped("a line that is no JSON" if row.strip() else "an empty line")
            messages, tools = read_row(row)
            if seen is not None:
                _first_of_its_kind(messages, seen)
        except Dropped as reason:
            counts[str(reason)] += 1
            continue
        counts["kept"] += 1
        yield {
            "id": f"{source.name}-{number}",
            "messages": messages,
            "source": source.name,
            **({"tools": tools} if tools else {}),
        }


def _first_of_its_kind(messages: list[dict[str, Any]], seen: set[bytes]) -> None:
    asked = next(m["content"] for m in messages if m["role"] == "user")
    digest = hashlib.blake2b(" ".join(asked.split()).encode(), digest_size=8).digest()
    if digest in seen:
        raise Dropped("a question that was there before")
    seen.add(digest)


def write_sources(
    sources: Sequence[Source], out: Path, *, say: Callable[[str], None], deduplicate: bool = True
) -> dict[str, dict[str, int]]:
    """Write the sources' conversations one after the other; return the counts of each.

    Raises:
        UserError: a source that cannot be read, or nothing that was kept.
    """
    seen: set[bytes] | None = set() if deduplicate else None
    result: dict[str, dict[str, int]] = {}
    with atomic_path(out) as temporary, open(temporary, "w", encoding="utf-8") as file:
        for source in sources:
            counts: Counter[str] = Counter(rows=0, kept=0)
            for line in conversations(source, rows_of(source), seen, counts):
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
    return result


def data_set_file(settings: PromptSettings, source: Source) -> Path:
    """Return where this machine keeps the conversations of a data set of the Hub."""
    key = [*astuple(source), settings.revision, settings.max_prompts, settings.deduplicate]
    name = f"{source.path.replace('/', '--')}-{sha256_text(canonical_json(key))[:16]}.jsonl"
    return cache_folder() / "prompts" / name


def fetch_data_set(settings: PromptSettings, source: Source, monitor: Monitor) -> Path:
    """Read a data set of the Hub into its file on this machine, and return the file.

    Raises:
        UserError: the Hub does not answer, has no such data set, or only other formats.
    """
    file = data_set_file(settings, source)
    check_available(settings.source)
    datasets_package(source.path)
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(source.path, revision=settings.revision).sha
    except Exception as error:  # the Hub client has many: gated, unknown, interrupted
        raise UserError(
            f"the data set could not be read from the Hub: {error}",
            where=source.path,
            do="check the id, prompts.revision, your network and your login",
        ) from None
    monitor.say(f"prompts: reading {source.path}, split {source.split}, at commit {commit}")
    pinned = replace(source, revision=commit, quota=settings.max_prompts)
    counts = write_sources(
        [pinned],
        file,
        say=lambda line: monitor.say(f"prompts: {line}"),
        deduplicate=settings.deduplicate,
    )
    write_json(file.with_suffix(".json"), {"commit": commit, "counts": counts[source.name]})
    return file


def check_available(source: str) -> None:
    """Raise a `UserError` if the Hub does not answer, for a data set that is not in the cache."""
    if not hub_answers():
        raise UserError(
            "expected a file or a data set, found neither: there is no such file, the Hub does not "
            "answer, and this machine's cache has no data set of this name with these settings",
            where=source,
            do="check the path; a data set can be made a file where there is a network: "
            f"python data_prep/chats.py {source} --out prompts.jsonl",
        )
