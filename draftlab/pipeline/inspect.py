"""Looking into what a run left: counts, hashes, one conversation coloured by its mask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.files import read_json
from draftlab.formatting import count_text, plain_values, size_text
from draftlab.heads.family import get_family
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS, load_config, stored_shapes
from draftlab.pipeline.head_workspace import recipe_of
from draftlab.pipeline.resolve import REFERENCE, reference_head
from draftlab.pipeline.run_folder import find_run
from draftlab.pipeline.stages import STAGES
from draftlab.pipeline.store_statistics import survey
from draftlab.report import print_report, print_suites
from draftlab.store.manifest import MANIFEST
from draftlab.store.store import Store
from draftlab.target_model.boundaries import default_boundaries
from draftlab.target_model.loading import load_tokenizer
from draftlab.text.samples import highlight_answers

REPORT = "report.json"
OF_A_FOLDER = (CONFIG, WEIGHTS, NATIVE, MANIFEST, "report.html", "recipe.yaml")
"""Files that stand for the folder they lie in."""


def inspect_path(what: str | None, sample: int, console: Console, *, verify: bool = False) -> None:
    """Prints what a run, a store, a head folder or a report (its folder or a file of it) holds.

    Args:
        what: path or run name; None: the latest run.
        sample: conversation to print of a run or store.
        verify: hash a store's shards again.
    """
    path = Path(what) if what is not None else find_run(None)
    if what == REFERENCE and not path.exists():
        path = reference_head()
    path = _folder_of(path)
    if file := _report_file(path):
        print_report(Report.read(file), console)
    elif (path / MANIFEST).is_file():
        store, run = Store.open(path), path.resolve().parent
        _store(store, console, verify)
        if (run / "recipe.yaml").is_file():
            _conversation(store, load_tokenizer(recipe_of(run).target), sample, console)
        else:
            console.print("a store outside of a run: its conversations need a tokenizer to be read")
    elif (path / CONFIG).is_file():
        _head(path, console)
    else:
        _refuse_others(path)
        _run(find_run(None if what is None else str(path)), sample, console, verify)


def _refuse_others(path: Path) -> None:
    """Of what is there and is nothing of ours, what it looks like and which verb reads it."""
    expected = "expected a run, a store, a head folder or a report"
    if path.is_file():
        raise UserError(f"{expected}, found another file", where=path, do="name its run's folder")
    inside = [] if (path / "recipe.yaml").is_file() else sorted(path.glob("*"))
    folders = [path, *inside]
    if models := [folder for folder in folders if (folder / NATIVE).is_file()]:
        there = quote(str(models[0]))
        raise UserError(
            f"{expected}, found a model in another program's layout",
            where=models[0],
            do=f"if it is a head, `draftlab doctor {there}` looks into it, and "
            f"`draftlab import {there} --to FOLDER` makes a head folder of it",
        )


def inspect_reports(whats: Sequence[str], console: Console) -> None:
    """Prints several reports (folders or files) in one table, a suite beside a suite."""
    files = {what: _report_file(_folder_of(Path(what))) for what in whats}
    for what, file in files.items():
        if file is None:
            raise UserError(
                "expected a report: a folder that `draftlab eval` wrote, or its report.json",
                where=what,
                do="name one run, store or head at a time; only reports are printed together",
            )
    print_suites([Report.read(file) for file in files.values() if file], console)


def _folder_of(path: Path) -> Path:
    """The folder that a path stands for, if it is a file that stands for one."""
    return path.parent if path.is_file() and path.name in OF_A_FOLDER else path


def _report_file(path: Path) -> Path | None:
    """The report that a path is, or holds."""
    files = (path, path / REPORT) if path.suffix == ".json" else (path / REPORT,)
    return next((file for file in files if file.is_file()), None)


def _table(title: str, rows: dict[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for key, value in rows.items():
        table.add_row(key, str(value))
    console.print(table)


def _run(folder: Path, sample: int, console: Console, verify: bool) -> None:
    stages: dict[str, str] = {}
    records = [folder / "stages" / f"{name}.json" for name in STAGES]
    for file in filter(Path.is_file, records):
        record = read_json(file, kind="stage record")
        stages[file.stem] = "whole" if record["complete"] else "unfinished"
    if (folder / STAGES["eval"].artefact / REPORT).is_file() and "eval" in stages:
        place = quote(str(folder / STAGES["eval"].artefact))
        stages["eval"] += f"; `draftlab inspect {place}` prints it"
    _table(f"run {folder.name}", {"folder": folder, **stages}, console)
    if (folder / "head" / CONFIG).is_file():
        _head(folder / "head", console)
    if stages.get("store") == "whole":
        store = Store.open(folder / "store")
        _store(store, console, verify)
        _conversation(store, load_tokenizer(recipe_of(folder).target), sample, console)


def _head(folder: Path, console: Console) -> None:
    config, shapes = load_config(folder), stored_shapes(folder)
    weights = sum(math.prod(shape) for shape in shapes.values())
    last, options = config.target_num_layers, config.options()
    imported = config.provenance.get("imported")
    usual, default = default_boundaries(last), ""
    if not get_family(config.family).reads_last_state and config.boundaries != usual:
        default = f" (by default {list(usual)})"
    _table(
        f"head {folder}",
        {
            "family": config.family,
            "boundaries": f"{list(config.boundaries)} of {last} layers{default}; each "
            "is the input of that layer (the output of the one before)"
            + (f", {last} the state before the final norm" if last in config.boundaries else ""),
            "target": f"{config.target.name} ({config.target.architecture}, "
            f"{config.target.fingerprint[:12]})",
            "layers": config.num_layers,
            "hidden, feed-forward": f"{config.hidden_size}, {config.intermediate_size}",
            "weights": f"{len(shapes)} tensors, {weights:,} values, "
            f"{size_text((folder / WEIGHTS).stat().st_size)}",
            "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}",
            "trained K": config.k_trained,
            "options": ", ".join(name for name, value in options.items() if value is True)
            or "none",
            "embeddings": config.embeddings,
            **{
                name.replace("_", " "): _option(v)
                for name, v in options.items()
                if type(v) is not bool
            },
            **({"imported from": f"{imported['layout']} layout"} if imported else {}),
            **dict(plain_values(config.provenance)),
        },
        console,
    )


def _option(value: Any) -> Any:
    return _fields(value.model_dump(mode="json")) if isinstance(value, BaseModel) else value


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _store(store: Store, console: Console, verify: bool) -> None:
    if verify:
        store.verify()
    manifest, counts = store.manifest, store.manifest.counts
    size = sum(shard.bytes or 0 for shard in manifest.shards)
    found = survey(store)
    coverage = "covers " + ", ".join(
        f"{share:.1%} with {kinds:,}" for kinds, share in found.coverage.items()
    )
    most = max(count for _, count in found.lengths)
    lengths = "\n".join(
        f"≤ {longest:<7,} {count:>9,} {'▇' * math.ceil(30 * count / most)}"
        for longest, count in found.lengths
    )
    _table(
        f"store {store.folder}",
        {
            "target": f"{store.identity.target_name} ({store.identity.target_fingerprint[:12]})",
            "boundaries": f"{list(store.identity.boundaries)}, inputs of layers",
            "records": f"{counts.records:,} in {count_text(len(manifest.shards), 'shard')}",
            "tokens": f"{counts.tokens:,}, {counts.loss_tokens / counts.tokens:.1%} in answers, "
            f"{found.predicted / counts.tokens:.1%} predicted",
            "draft vocabulary": coverage,
            "lengths": lengths,
            "size": f"{size_text(size)}, {size / counts.tokens:,.0f} bytes a token, "
            f"{store.identity.dtype}",
            "checksums": f"the SHA-256 of all {len(manifest.shards)} shards agree"
            if verify
            else "sizes agree; --verify hashes every byte",
            "dropped": _fields(manifest.dropped.model_dump()),
            "truncated": manifest.truncated,
            "not finite": sum(len(shard.not_finite) for shard in manifest.shards),
        },
        console,
    )


def _conversation(store: Store, tokenizer: Any, index: int, console: Console) -> None:
    if not 0 <= index < len(store):
        raise UserError(
            f"expected a sample in 0..{len(store) - 1}, found {index}", where="--sample"
        )
    tokens, spans = store.tokens_and_spans(index)
    console.print(f"\nconversation {store.ids[index]}: coloured tokens are the target's answer")
    console.print(highlight_answers(tokens.tolist(), spans.tolist(), tokenizer))
