"""A commented recipe for a target, prompts and a GPU, with sizes that its plan gives."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from draftlab.export.layout import Layout
from draftlab.heads.family import get_family
from draftlab.plan.estimate import USABLE_MEMORY, RecipeSizes, estimate_table
from draftlab.plan.model_sizes import PROMPT_TOKENS
from draftlab.recipe.commented_yaml import comment_lines, setting_text
from draftlab.recipe.hardware import GPUS
from draftlab.recipe.head_spec import target_config
from draftlab.recipe.recipe import Recipe, parse_recipe
from draftlab.run.stages import STAGES
from draftlab.text.settings import SELF

EPOCHS = 6
"""Passes over the tokens of the plan, which are an upper bound, since answers may end early."""
NARROW = 1024
"""Hidden size up to which Muon's rate by width is used. It was the best of those tried on a target
of 256 (8e-3) and on one of 576 channels (4e-3, beside 8e-3 and 2e-3)."""


def new_recipe(tree: dict[str, Any]) -> Recipe:
    """Return a recipe whose sizes fit its target, its prompts and its GPU; raise a `UserError` as
    `RecipeSizes`.

    The tree has name, target, prompts, head and hardware; without hardware.gpu a CPU does the work.
    """
    gpu, prompts = GPUS.get(tree["hardware"]["gpu"] or ""), tree["prompts"]
    if prompts["max_prompts"] is None and (gpu is None or prompts["source"] == SELF):
        tree = tree | {"prompts": prompts | {"max_prompts": 20_000 if gpu else 256}}
    recipe = parse_recipe(tree)
    family = get_family(recipe.head.family)
    text = target_config(recipe.target).get_text_config()
    answer, rows, most = (512, 8, 4096) if gpu else (128, 4, 512)
    train: dict[str, Any] = {"batch_rows": rows, "ttt_steps": 5 if gpu else 3, "steps": 1}
    if text.hidden_size <= NARROW:
        rate = round(8e-3 * min(1, 256 / text.hidden_size), 4)
        rates = {"learning_rate": rate, "adamw_learning_rate": 2e-3}
        train |= {"optimizer": "muon", "schedule": "wsd"} | rates
    else:
        train["learning_rate"] = 4e-4
    if not family.has_own_loss:
        train["loss"] = "lk"
    regenerate = {"max_new_tokens": answer, "temperatures": [0.0, 0.8]}
    tree = tree | {"train": train, "regenerate": regenerate, "record": (record := {})}
    tree["eval"] = {"max_prompts": 80 if gpu else 16, "max_new_tokens": min(256, answer)}
    if not family.whole_vocabulary and text.vocab_size > 3000:
        # A third, as EAGLE3's 32,000 of Llama 3's 128,000 tokens.
        tree["draft_vocab"] = {"size": min(32_000, text.vocab_size // 3 // 1000 * 1000)}
    layouts = [name for name, one in family.layouts().items() if isinstance(one, Layout)]
    if "speculators" not in layouts:
        tree["export"] = {"formats": layouts[:1]}
    sizes = RecipeSizes(parse_recipe(tree))
    target, talks = sizes.target, sizes.conversations
    memory = USABLE_MEMORY * 1e9 * gpu.memory if gpu else 8e9
    if gpu and (gpus := math.ceil(target.bytes / (0.8 * memory))) > 1:
        tree |= {name: tree[name] | {"gpus": gpus} for name in ("target", "hardware")}
        memory *= gpus
    longest = talks.long_prompt + talks.answer if talks else PROMPT_TOKENS + answer
    row = min(max(256, 1 << math.ceil(math.log2(longest))), most, target.max_length)
    train["row_tokens"] = record["max_length"] = row
    at_once = (memory - target.bytes) / (row * target.kv_bytes + (target.state_bytes or 0) + 1)
    regenerate["batch"] = min(1024 if gpu else 32, 1 << int(math.log2(max(1, at_once))))
    regenerate["piece"] = 16 * regenerate["batch"]
    tokens = talks.count * min(talks.length, row) if talks else 1e6
    train["steps"] = max(50, math.ceil(EPOCHS * tokens / (row * rows)))
    free = shutil.disk_usage(Path()).free
    if tokens * sizes.token_bytes > free / 2:
        record["window"] = f"{max(1, int(0.4 * free / 1e9))}GB"
    while gpu and rows > 1 and RecipeSizes(parse_recipe(tree)).head.memory > gpu.memory / 2 * 1e9:
        train["micro_rows"] = rows = rows // 2
    return parse_recipe(tree)


def recipe_lines(recipe: Recipe, runs: Path) -> Iterator[str]:
    """Yield a recipe as YAML: each setting under its meaning, and its estimate at the end."""
    text = (
        "A recipe of `draftlab new`. Settings that are not here have their defaults, which "
        "`draftlab recipe show` prints; `draftlab recipe schema` explains all of them. Training "
        f"reads each token about {EPOCHS} times if answers are as long as they may be."
    )
    yield from comment_lines(text.split())
    if recipe.record.window:
        text = "record.window is two fifths of the disk that was free here."
        yield from comment_lines(text.split())
    yield from _settings_lines(recipe, "")
    yield ""
    yield from (f"# {line}".rstrip() for line in estimate_table(recipe, runs, STAGES))


def _settings_lines(settings: BaseModel, pad: str) -> Iterator[str]:
    """Yield the settings that are not at their defaults, each under its description."""
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if (value == field.default and name not in ("target", "path", "prompts", "source")) or (
            name == "name"  # it is the file's
        ):
            continue
        yield from [""] * (not pad)
        yield from comment_lines((field.description or "").split(), pad)
        if isinstance(value, BaseModel):
            yield f"{pad}{name}:"
            yield from _settings_lines(value, pad + "  ")
        else:
            yield pad + setting_text(settings, name)
