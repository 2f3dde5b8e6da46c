"""Our heads in the comparison of trainers: their recipes, and what their trainings took."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from acceptance_peers import WARMUP_STEPS, Trained

from draftlab.heads.head import DraftHead
from draftlab.recipe.recipe import Recipe, load_recipe

OURS = "ours"
"""Name of our heads."""
FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = {"eagle3": "quickstart", "peagle": "quickstart_peagle", "dspark": "quickstart_dspark"}
SETTINGS = {
    "eagle3": (
        "train.ttt_steps=4",
        "train.loss=lk",
        "head.intermediate_size=768",
        "head.fc_norm=true",
        "head.qk_norm=true",
    ),
    "peagle": ("head.num_layers=4",),
    "dspark": ("head.num_layers=5", "train.anchor_share=1"),
}
"""Beside the recipes, which are made for a CPU: as many unrolled steps as drafts, larger heads, and
what raised validation's AL at this number of tokens."""


def our_recipe(options: argparse.Namespace, filled: float, family: str, seed: int) -> Recipe:
    """Return our recipe of a family.

    Args:
        options: of the command line.
        filled: share of our rows' positions that are tokens.
    """
    steps = max(1, round(options.tokens / (options.step_tokens * filled)))
    rows = [
        f"prompts.max_prompts={options.max_prompts}",
        f"train.row_tokens={options.row_tokens}",
        f"train.batch_rows={max(1, options.step_tokens // options.row_tokens)}",
        f"train.steps={steps}",
        *SETTINGS.get(family, ()),
        "train.checkpoint_every=1000000",
    ]
    shared = options.settings
    if family not in options.families:  # its recipe makes the store alone
        shared = [one for one in shared if not one.startswith(("head.", "train."))]
    file = FOLDER / f"{RECIPES[family]}.yaml"
    own = [f"name={run_name(OURS, family, seed)}", f"seed={seed}"]
    return load_recipe(file, [*rows, *shared, *own])


def run_name(name: str, family: str, seed: int) -> str:
    """Return the name of a head's run."""
    return "-".join([*name.replace(",", "").split(), family, f"seed{seed}"])


def our_training(folder: Path, recipe: Recipe, head: DraftHead) -> Trained:
    """Read a training of ours from its metrics; its first steps are left out as a peer's are."""
    rows = [json.loads(line) for line in (folder / "train/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "tokens_per_s" in row]
    tokens = np.diff([0, *(row["tokens_seen"] for row in rows)])
    seconds = tokens / np.array([row["tokens_per_s"] for row in rows])
    steps = np.array([row["step"] for row in rows])
    late = steps > min(WARMUP_STEPS, steps[-1] // 2)
    steady = seconds[late].sum() / tokens[late].sum() * tokens.sum()
    trained = sum(p.numel() for n, p in head.named_parameters() if n not in head.shared_tensors())
    peak = max(row["peak_memory_gib"] for row in rows)
    rate = recipe.train.learning_rate
    counts = int(steps[-1]), int(tokens.sum()), trained
    return Trained(*counts, rate, float(seconds.sum()), float(steady), peak)
