"""Measure what fp8 features do to a head: the same recipe on bfloat16 and fp8 stores.

    python eval/lab/fp8.py ARM --out DIR [--recipe recipes/quickstart.yaml] [--answers
    answers.jsonl] python eval/lab/fp8.py table --out DIR

An ARM is a store dtype, bfloat16 or fp8, alone or with `-massive`: then two channels of every
boundary are recorded 1,000 times as large, like the massive activations of large models, and scaled
back when they are read. The head learns the same function, so differences are rounding's. Each arm
trains the recipe's head with the same seed and steps, and decodes the held-out suite.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.heads.folder import save_head
from draftlab.pipeline.api import evaluate_head
from draftlab.pipeline.recipe import load_recipe
from draftlab.pipeline.recording import Recording
from draftlab.pipeline.training import train_head
from draftlab.store.fp8 import dequantise
from draftlab.store.store import Record, Store
from draftlab.target_model.model import HiddenStates, Target
from eval.measurements import PrintMonitor

ARMS = ("bfloat16", "fp8", "bfloat16-massive", "fp8-massive")
MASSIVE, FACTOR = (7, 100), 1000.0  # channels of the target's hidden size


def scale(boundaries: int, hidden: int) -> Tensor:
    """Return float32 [F]: FACTOR at the massive channels, 1 elsewhere."""
    factors = torch.ones(boundaries, hidden)
    factors[:, list(MASSIVE)] = FACTOR
    return factors.flatten()


class MassiveTarget:
    """A target whose features have massive channels."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def states(
        self, token_ids: Tensor, boundaries: tuple[int, ...], **options: Any
    ) -> HiddenStates:
        states = self._target.states(token_ids, boundaries, **options)
        factors = scale(len(boundaries), self._target.hidden_size)
        return HiddenStates(states.features * factors.to(states.features), states.last)


class UnscaledStore(Store):
    """A store that scales massive channels back when they are read."""

    def view(self, index: int) -> Record:
        record = super().view(index)
        factors = scale(len(self.identity.boundaries), self.identity.hidden_size)
        features = record.features
        if record.scales is not None:
            features = dequantise(features, record.scales)
        features = (features.float() / factors).to(features.dtype)
        return replace(record, features=features, scales=None)


def train(arm: str, options: argparse.Namespace) -> None:
    """Record, train and evaluate one arm."""
    dtype, _, massive = arm.partition("-")
    overrides = [f"name={arm}", f"record.dtype={dtype}", "eval.compare=[]", "eval.timing_prompts=0"]
    recipe = load_recipe(options.recipe, [*overrides, *options.settings])
    folder = options.out / arm
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(options.answers, folder / "answers.jsonl")
    recording = Recording(recipe, folder, PrintMonitor())
    if massive:
        recording.__dict__["target"] = MassiveTarget(recording.target)
    recording.record(folder / "store", gpus=1)
    store = (UnscaledStore if massive else Store).open(folder / "store")
    head = train_head(
        recipe, store, recording.tokenizer, folder / "train", monitor=PrintMonitor(), ranks=None
    )
    save_head(folder / "head", head, torch.bfloat16)
    report = evaluate_head(
        recipe.target, folder / "head", recipe.eval, folder / "eval", monitor=PrintMonitor()
    )
    lines = (folder / "train" / "metrics.jsonl").read_text().splitlines()
    validation = next(json.loads(s) for s in reversed(lines) if "validation" in s)["validation"]
    rows = [vars(row) for row in report.rows if row.drafter != "none"]
    keys = ("temperature", "draft_probs", "acceptance_length", "acceptance_length_ci", "drafts")
    manifest = Store.open(folder / "store").manifest
    result = {
        "arm": arm,
        "bytes_token": round(sum(s.bytes for s in manifest.shards) / manifest.counts.tokens),
        "fp8_errors": manifest.shards[0].fp8_errors,
        "alpha": validation["alpha"],
        "walk_al": validation["walk_al"],
        "sampled_al": validation["sampled_al"],
        "rows": [{key: row[key] for key in keys} for row in rows],
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1, default=str) + "\n")


def table(out: Path) -> None:
    """Print every arm beside bfloat16 of its kind, as Markdown."""
    results = {arm: json.loads((out / arm / "result.json").read_text()) for arm in ARMS}
    print("| store | bytes a token | α of steps 1, 2, … | AL (T, draft probabilities) |")
    print("|---|---|---|---|")
    for arm, result in results.items():
        base = results[arm.replace("fp8", "bfloat16")]
        alphas = " ".join(
            f"{a:.4f} ({a / b - 1:+.2%})" if arm != base["arm"] else f"{a:.4f}"
            for a, b in zip(result["alpha"], base["alpha"], strict=True)
        )
        lengths = []
        for row, other in zip(result["rows"], base["rows"], strict=True):
            al, reference = row["acceptance_length"], other["acceptance_length"]
            change = f", {al / reference - 1:+.2%}" if arm != base["arm"] else ""
            low, high = row["acceptance_length_ci"]
            where = f"{row['temperature']}, {'on' if row['draft_probs'] else 'off'}"
            lengths.append(f"{al:.3f} [{low:.2f}, {high:.2f}] ({where}{change})")
        print(f"| {arm} | {result['bytes_token']:,} | {alphas} | {'<br>'.join(lengths)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=[*ARMS, "table"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--answers", type=Path, default=Path("runs/quickstart/answers.jsonl"))
    parser.add_argument("settings", nargs="*", help="recipe settings, such as train.steps=100")
    options = parser.parse_intermixed_args()
    if options.arm == "table":
        table(options.out)
    else:
        train(options.arm, options)


if __name__ == "__main__":
    main()
