"""Print a run, a store, a head or reports: `draftlab inspect`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.formatting import count_text, plain_values, size_text
from draftlab.heads.family import get_family
from draftlab.heads.folder import CONFIG, NATIVE, WEIGHTS, load_config, stored_shapes
from draftlab.report.console import print_sections
from draftlab.report.sections import sections, suite_sections
from draftlab.run.folder import RUNS, find_run
from draftlab.run.resolve import REFERENCE, recipe_of, reference_head
from draftlab.run.stages import STAGES, read_record, record_path
from draftlab.store.manifest import MANIFEST, Manifest, StoreWindow
from draftlab.store.shard import list_shards
from draftlab.store.store import Store
from draftlab.store.urls import is_url
from draftlab.target_model.hidden_states import default_boundaries
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.samples import highlight_answers

REPORT = "report.json"
EXPECTED = "expected a run, a store, a head folder or a report"
NAMES_ITS_FOLDER = (CONFIG, WEIGHTS, NATIVE, MANIFEST, "report.html", "recipe.yaml")
"""Files whose path is read as that of their folder."""


def inspect_path(name: str | None, sample: int, console: Console, *, verify: bool = False) -> None:
    """Print a run, a store, a head folder or a report.

    Args:
        name: path (the folder or a file in it), URL of a store, or run name; None: the latest run.
        sample: index of the conversation to print.
        verify: whether to hash a store's shards.
    """
    if name is not None and is_url(name):
        store = Store.open(name)
        _store(store, console, verify)
        _conversation(store, None, sample, console)
        return
    path = Path(name) if name is not None else find_run(None)
    if name == REFERENCE and not path.exists():
        path = reference_head()
    path = _folder_of(path)
    if file := _report_file(path):
        print_sections(sections(Report.read(file)), console)
    elif (path / MANIFEST).is_file():
        _recorded(path, path.resolve().parent, sample, verify)(console)
    elif (path / CONFIG).is_file():
        _head(path, console)
    else:
        _refuse_other_files(path)
        _run(_find_run(name, path), sample, console, verify)


def _find_run(name: str | None, path: Path) -> Path:
    """Return the folder of a run; say what else is read where a name is that of nothing."""
    try:
        return find_run(None if name is None else str(path))
    except UserError as error:
        if name is None or path.exists() or (RUNS / path).exists():
            raise
        what, do = f"{EXPECTED}, found none", f"check the path; {error.do}"
        raise UserError(what, where=name, do=do) from None


def _refuse_other_files(path: Path) -> None:
    """Raise a `UserError` for files that other verbs read."""
    if path.is_file():
        raise UserError(
            f"{EXPECTED}, found another file", where=path, do="name the folder of its run"
        )
    inside = [] if (path / "recipe.yaml").is_file() else sorted(path.glob("*"))
    folders = [path, *inside]
    if heads := [folder for folder in inside if (folder / CONFIG).is_file()]:
        raise UserError(
            f"{EXPECTED}, found a folder with a head",
            where=path,
            do=f"name it: `draftlab inspect {quote(str(heads[0]))}`",
        )
    if models := [folder for folder in folders if (folder / NATIVE).is_file()]:
        model = quote(str(models[0]))
        raise UserError(
            f"{EXPECTED}, found a model in another program's layout",
            where=models[0],
            do=f"if it is a head, `draftlab doctor {model}` checks it, and "
            f"`draftlab import {model} --to FOLDER` converts it to a head folder",
        )


def inspect_reports(names: Sequence[str], console: Console) -> None:
    """Print several reports (folders or files) in one table, with a column for each suite."""
    files = {name: _report_file(_folder_of(Path(name))) for name in names}
    for name, file in files.items():
        if file is None:
            raise UserError(
                "expected a report: a folder that `draftlab eval` wrote, or its report.json",
                where=name,
                do="name one run, store or head at a time; only reports are printed together",
            )
    reports = [Report.read(file) for file in files.values() if file]
    print_sections(suite_sections(reports), console)


def _folder_of(path: Path) -> Path:
    """Return the folder of a file that names its folder; otherwise the path itself."""
    return path.parent if path.is_file() and path.name in NAMES_ITS_FOLDER else path


def _report_file(path: Path) -> Path | None:
    """Return the report.json that a path is or contains."""
    files = (path, path / REPORT) if path.suffix == ".json" else (path / REPORT,)
    return next((file for file in files if file.is_file()), None)


def _table(title: str, rows: dict[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for key, value in rows.items():
        table.add_row(key, str(value))
    console.print(table)


def _run(folder: Path, sample: int, console: Console, verify: bool) -> None:
    stages: dict[str, str] = {}
    for stage in STAGES.values():
        if (path := record_path(folder, stage)).is_file():
            complete = read_record(path)["complete"]
            stages[stage.name] = "complete" if complete else "unfinished"
    if (folder / STAGES["eval"].artefact / REPORT).is_file() and "eval" in stages:
        report = quote(str(folder / STAGES["eval"].artefact))
        stages["eval"] += f"; `draftlab inspect {report}` prints it"
    show_store = None
    if stages.get("store") == "complete":  # a sample that is not there is refused first
        show_store = _recorded(folder / STAGES["store"].artefact, folder, sample, verify)
    _table(f"run {folder.name}", {"folder": folder, **stages}, console)
    if (folder / "head" / CONFIG).is_file():
        _head(folder / "head", console)
    if show_store:
        show_store(console)


def _head(folder: Path, console: Console) -> None:
    config, shapes = load_config(folder), stored_shapes(folder)
    weights = sum(math.prod(shape) for shape in shapes.values())
    num_layers, options = config.target_num_layers, config.options()
    imported, positions = config.provenance.get("imported"), config.validated_positions
    default, note = default_boundaries(num_layers), ""
    if not get_family(config.family).reads_last_state and config.boundaries != default:
        note = f" (by default {list(default)})"
    _table(
        f"head {folder}",
        {
            "family": config.family,
            "boundaries": f"{list(config.boundaries)} of {num_layers} layers{note}; each "
            "is the input of that layer (the output of the layer before)"
            + f", {num_layers} the state before the final norm"
            * (num_layers in config.boundaries),
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
                if type(v) is not bool and v is not None
            },
            **({"validated up to": f"{positions:,} tokens"} if positions else {}),
            **({"imported from": f"{imported['layout']} layout"} if imported else {}),
            **_template_arguments(config.provenance.get("template_arguments")),
            **dict(plain_values(config.provenance)),
        },
        console,
    )


def _template_arguments(modes: list[dict[str, Any]] | None) -> dict[str, str]:
    """Return a row for the template arguments of records, if any has some."""
    return {"template arguments": json.dumps(modes)} if modes and any(modes) else {}


def _option(value: Any) -> Any:
    return _fields(value.model_dump(mode="json")) if isinstance(value, BaseModel) else value


def _fields(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _contents(manifest: Manifest) -> dict[str, str]:
    """Return rows about what a store is of."""
    identity, counts = manifest.identity, manifest.counts
    return {
        "target": f"{identity.target_name} ({identity.target_fingerprint[:12]})",
        "boundaries": f"{list(identity.boundaries)}, inputs of layers",
        "records": f"{counts.records:,} in {count_text(len(manifest.shards), 'shard')}",
        "tokens": f"{counts.tokens:,}, {counts.loss_tokens / counts.tokens:.1%} in answers",
    }


def _store(store: Store, console: Console, verify: bool) -> None:
    if verify:
        store.verify()
    manifest, counts = store.manifest, store.manifest.counts
    num_bytes, lengths = int(manifest.written.bytes.sum()), np.array(store.lengths)
    _table(
        f"store {store.address}",
        {
            **_contents(manifest),
            "lengths": f"{lengths.min():,} to {lengths.max():,}, mean {lengths.mean():,.0f}",
            "size": f"{size_text(num_bytes)}, {num_bytes / counts.tokens:,.0f} bytes per token, "
            f"{store.identity.dtype}",
            "checksums": f"the SHA-256 hashes of all {len(manifest.shards)} shards agree"
            if verify
            else "file sizes agree; --verify compares hashes",
            **_template_arguments(manifest.template_arguments),
            "dropped": _fields(manifest.dropped.model_dump()),
            "truncated": manifest.truncated,
        },
        console,
    )


def _recorded(folder: Path, run: Path, sample: int, verify: bool) -> Callable[[Console], None]:
    """Open a store, and return what prints it, with a conversation if its run is known."""
    manifest = Manifest.read(folder / MANIFEST)
    if (window := manifest.window) and window.rolls:
        return partial(_window, folder, manifest, window)
    recipe = recipe_of(run) if (run / "recipe.yaml").is_file() else None
    store = Store.open(folder, url=recipe.record.url if recipe else None)
    if not 0 <= sample < len(store):
        raise UserError(
            f"expected a sample in 0..{len(store) - 1}, found {sample}",
            where="--sample",
            do="choose a number in this range",
        )

    def show(console: Console) -> None:
        _store(store, console, verify)
        _conversation(store, recipe.target if recipe else None, sample, console)

    return show


def _conversation(
    store: Store, target: TargetSettings | None, index: int, console: Console
) -> None:
    if target is None:
        console.print("no conversation: without a run's recipe the tokenizer is unknown")
        return
    try:
        tokenizer = load_tokenizer(target)
    except UserError as error:
        console.print(f"no conversation: {error.what}")
        return
    tokens, spans = store.tokens_and_spans(index)
    console.print(f"\nconversation {store.ids[index]}: the target's answer is coloured")
    console.print(highlight_answers(tokens.tolist(), spans.tolist(), tokenizer))


def _window(folder: Path, manifest: Manifest, window: StoreWindow, console: Console) -> None:
    """Print a store whose shards come and go, and what is there at the moment."""
    num_kept = window.validation_shards
    there = [size for number, (size, _) in list_shards(folder).items() if number >= num_kept]
    size = size_text(float(manifest.planned_sizes[num_kept:].sum()))
    _table(
        f"store {folder}",
        {
            **_contents(manifest),
            "held out": f"{window.validation_records:,} records in "
            f"{count_text(num_kept, 'shard')}, which stay",
            "window": f"{size_text(window.size)} of {size}: the other shards are recorded while a "
            "training reads them, and deleted",
            "there now": f"{count_text(len(there), 'shard')} of them, {size_text(sum(there))}",
        },
        console,
    )
