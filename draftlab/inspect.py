"""Looking into what a run left: counts, hashes, one conversation coloured by its mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftlab.base import UserError, read_json
from draftlab.chat.render import Rendered, coloured
from draftlab.data.manifest import MANIFEST
from draftlab.data.store import Store
from draftlab.heads.folder import CONFIG, load_config
from draftlab.report import print_report
from draftlab.results import Report
from draftlab.run import STAGES, find_run
from draftlab.subject import recipe_of
from draftlab.target.model import load_tokenizer
from draftlab.verbs import REFERENCE, reference_head


def inspect_path(what: str | None, sample: int, console: Console) -> None:
    """Prints what a run, a store, a head folder or a report.json holds.

    Args:
        what: path or run name; None: the latest run.
        sample: conversation to print of a run or store.
    """
    path = Path(what) if what is not None else find_run(None)
    if what == REFERENCE and not path.exists():
        path = reference_head()
    if path.is_file() and path.suffix == ".json":
        print_report(Report.read(path), console)
    elif (path / MANIFEST).is_file():
        store, run = Store.open(path), path.resolve().parent
        _store(store, console)
        if (run / "recipe.yaml").is_file():
            _conversation(store, load_tokenizer(recipe_of(run).target), sample, console)
        else:
            console.print("a store outside of a run: its conversations need a tokenizer to be read")
    elif (path / CONFIG).is_file():
        _head(path, console)
    else:
        _run(find_run(what), sample, console)


def _table(title: str, rows: dict[str, Any], console: Console) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for key, value in rows.items():
        table.add_row(key, str(value))
    console.print(table)


def _run(folder: Path, sample: int, console: Console) -> None:
    stages = {}
    records = [folder / "stages" / f"{name}.json" for name in STAGES]
    for file in filter(Path.is_file, records):
        record = read_json(file, kind="stage record")
        stages[file.stem] = "whole" if record["complete"] else "unfinished"
    _table(f"run {folder.name}", {"folder": folder, **stages}, console)
    if (folder / "head" / CONFIG).is_file():
        _head(folder / "head", console)
    if stages.get("store") == "whole":
        store = Store.open(folder / "store")
        _store(store, console)
        _conversation(store, load_tokenizer(recipe_of(folder).target), sample, console)


def _head(folder: Path, console: Console) -> None:
    config = load_config(folder)
    _table(
        f"head {folder}",
        {
            "family": config.family,
            "boundaries": f"{list(config.boundaries)} of {config.target_num_layers} layers; each "
            "is the input of that layer (the output of the one before)",
            "target": f"{config.target.name} ({config.target.architecture}, "
            f"{config.target.fingerprint[:12]})",
            "hidden, feed-forward": f"{config.hidden_size}, {config.intermediate_size}",
            "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,}",
            "trained steps": config.k_trained,
            "norm_before_residual": config.norm_before_residual,
            "embeddings": config.embeddings,
            **{k: v for k, v in config.provenance.items() if k != "validation"},
        },
        console,
    )


def _store(store: Store, console: Console) -> None:
    manifest, counts = store.manifest, store.manifest.counts
    size = sum(shard.bytes or 0 for shard in manifest.shards)
    _table(
        f"store {store.folder}",
        {
            "target": f"{store.identity.target_name} ({store.identity.target_fingerprint[:12]})",
            "boundaries": f"{list(store.identity.boundaries)}, inputs of layers",
            "records": f"{counts.records:,} in {len(manifest.shards)} shards",
            "tokens": f"{counts.tokens:,}, {counts.loss_tokens / counts.tokens:.1%} in answers",
            "size": f"{size / 2**20:,.1f} MiB, {size / counts.tokens:,.0f} bytes a token",
            "dropped": manifest.dropped.model_dump(),
            "truncated": manifest.truncated,
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
    console.print(coloured(Rendered(tuple(tokens.tolist()), tuple(spans.tolist())), tokenizer))
