"""Rehearse a recipe: run all its stages on a tiny random target of the same architecture.

The stand-in has the target's number of layers, vocabulary, tokenizer and chat template. Its widths
and its number of experts are small, and so are the numbers of prompts, tokens and steps. All other
settings are the recipe's. Mistakes in them show within minutes, on a CPU.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.recipe.head_spec import target_config
from draftlab.recipe.recipe import Recipe, flatten, parse_recipe
from draftlab.run.folder import RUNS
from draftlab.target_model.auto_model import auto_class
from draftlab.target_model.loading import quiet_transformers
from draftlab.target_model.locate import TOKENIZER_FILES, resolve_target
from draftlab.target_model.stand_in import stand_in_config
from draftlab.text.prompts import EMBEDDED_PROMPTS, find_prompts, prompt_file
from draftlab.text.settings import SELF

REHEARSALS = RUNS / "rehearsals"
"""Folder of all rehearsals, apart from the runs, so that `runs/latest` is never one."""
MAX_SIZES: dict[str, int] = {
    "regenerate.max_new_tokens": 24,
    "regenerate.batch": 8,
    "regenerate.piece": 16,
    "prompts.max_prompts": 16,
    "record.shard_tokens": 4096,
    "record.batch_tokens": 2048,
    "record.max_length": 1024,
    "train.steps": 4,
    "train.row_tokens": 1024,
    "train.batch_rows": 2,
    "train.micro_rows": 1,
    "train.validate_every": 2,
    "eval.max_prompts": 3,
    "eval.max_new_tokens": 12,
    "eval.batch": 4,
    "eval.timing_prompts": 1,
    "eval.timing_tokens": 4,
    "head.intermediate_size": 96,
    "head.num_attention_heads": 4,
    "head.num_key_value_heads": 2,
    "head.head_dim": 16,
}
"""Largest values of settings in a rehearsal; smaller values of the recipe stay."""
ALWAYS = {"prompts.max_prompts", "eval.max_prompts", "record.max_length"}
"""Settings of `MAX_SIZES` that a rehearsal also limits where the recipe does not."""
REPLACED = {
    "target.dtype": "auto",
    "target.gpus": 1,
    "target.revision": None,
    "prompts.self_written": None,
    "regenerate.backend": "paged",
    "record.backend": "transformers",
    "record.url": None,
    "eval.engine": "paged",
    "train.validation_share": 0.2,
    "train.wandb": None,
    "head.init": None,
    "eval.compare": [],
}
"""Settings whose values a rehearsal replaces: they need the real target, its GPUs or a network."""
TARGET = "target"
"""Folder of the stand-in in a rehearsal's folder."""


class RehearsalMonitor(Monitor):
    """Passes on what a rehearsal says, but for warnings about the small sizes that it chose."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor

    def say(self, line: str) -> None:
        if not (line.startswith("warning: ") and any(name in line for name in MAX_SIZES)):
            self.monitor.say(line)

    def progress(self, stage: str, done: float, total: float, detail: str = "") -> None:
        self.monitor.progress(stage, done, total, detail)


def rehearsal_recipe(recipe: Recipe, runs: Path, monitor: Monitor) -> Recipe:
    """Return the recipe of a rehearsal, after making its stand-in in <runs>/<name>/target.

    An earlier rehearsal is removed. Raises a `UserError` if config or tokenizer of the target
    cannot be read, no stand-in of its architecture can be made, or the folder holds something else.
    """
    folder = runs / recipe.name
    if folder.exists() and not (folder / TARGET).is_dir():
        raise UserError(
            "expected the folder of an earlier rehearsal, found something else",
            where=folder,
            do="move it away, or give the recipe another name: name=other",
        )
    shutil.rmtree(folder, ignore_errors=True)
    make_stand_in(recipe, folder / TARGET)
    tree = recipe.model_dump(mode="json")
    changes = REPLACED | {
        key: MAX_SIZES[key] if value is None else min(value, MAX_SIZES[key])
        for key, value in flatten(recipe).items()
        if key in MAX_SIZES and (value is not None or key in ALWAYS)
    }
    changes |= _prompt_changes(recipe, monitor)
    for key in ("regenerate.backend", "record.backend", "eval.engine"):
        if (program := flatten(recipe)[key]) != changes[key]:
            monitor.say(
                f"{key}: {changes[key]} in place of {program}, which a rehearsal leaves out"
            )
    if recipe.record.url is not None:
        monitor.say(f"record.url: a rehearsal writes nothing to {recipe.record.url}")
    for key, value in changes.items():
        section, setting = key.split(".")
        tree[section][setting] = value
    tree["target"]["path"] = str(folder / TARGET)
    monitor.say(
        f"rehearsal of {recipe.name}: a random target with {recipe.target.path}'s layers, "
        "vocabulary and chat template, and small sizes; its head has no use"
    )
    return parse_recipe(tree)


def _prompt_changes(recipe: Recipe, monitor: Monitor) -> dict[str, Any]:
    """Return embedded prompts for files of prompts that do not exist yet, and say so."""
    changes: dict[str, Any] = {}
    (to_train, to_evaluate), suites = EMBEDDED_PROMPTS, []
    is_own = recipe.prompts.source == SELF
    file, why = None, "which a random target cannot write" if is_own else "which is on the Hub"
    try:
        file = find_prompts(recipe.prompts)
    except UserError:
        why = "which does not exist yet"
    if file is None:
        monitor.say(f"prompts.source: {to_train} in place of {recipe.prompts.source}, {why}")
    if file is None or recipe.prompts.source not in EMBEDDED_PROMPTS:
        changes |= {"prompts.source": str(file or to_train), "prompts.revision": None}
    for source in recipe.eval.suite or ():
        why, is_file = "", source.endswith((".jsonl", ".json"))
        if is_file:
            try:
                prompt_file(source)
            except UserError:
                why = "which does not exist yet"
        elif source not in EMBEDDED_PROMPTS:
            why = "which needs a network"
        if why:
            monitor.say(f"eval.suite: {to_evaluate} in place of {source}, {why}")
        suites.append(to_evaluate if why else source)
    if suites != [*(recipe.eval.suite or ())]:
        changes["eval.suite"] = suites
    return changes


def make_stand_in(recipe: Recipe, folder: Path) -> None:
    """Write a tiny random target of the target's architecture, with its tokenizer files.

    Weights are float32 and drawn from the recipe's seed. Raises a `UserError` as
    `rehearsal_recipe`.
    """
    own = target_config(recipe.target)
    config = stand_in_config(own)
    for name in ("image_size", "patch_size"):  # which the processor's files have
        if (size := getattr(getattr(own, "vision_config", None), name, None)) is not None:
            setattr(config.vision_config, name, size)
    source = resolve_target(recipe.target, TOKENIZER_FILES)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            model = (
                auto_class(config, whole=True)
                .from_config(config, trust_remote_code=recipe.target.trust_remote_code)
                .float()
            )
    except Exception as error:  # whatever a modelling file raises at sizes that it did not expect
        raise UserError(
            f"no small target of this architecture can be made: {type(error).__name__}: {error}",
            where=recipe.target.path,
            do="rehearse with a small target of your own: target=FOLDER and small settings",
        ) from None
    with quiet_transformers():
        model.save_pretrained(folder)
    for path in {path for pattern in TOKENIZER_FILES for path in source.glob(pattern)}:
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copy(path, folder / path.name)
    if not any((folder / file).exists() for file in ("tokenizer.json", "tokenizer.model")):
        raise UserError(
            "expected tokenizer.json or tokenizer.model beside the target's config, found neither",
            where=source,
            do="copy the target's tokenizer files there, or log in to the Hub and try again",
        )
