"""Measure what options of a head do to AL, each beside the recipe as it is.

    python eval/lab/options.py --seeds 0 1 2 --change "train.optimizer=adamw" "head.fc_norm=true"
    python eval/lab/options.py --recipe recipes/quickstart_peagle.yaml --out runs/options_peagle

The recipe, and the recipe with each --change (settings, separated by spaces), is a run for each
seed of training. All have the same answers, and the same store where it would be equal; they are
copied from the first run. A finished run is not repeated. AL is a mean over the seeds, at T = 0.
Differences are paired over prompts (bootstrap, 95 %); bold ones exclude 0. The intervals cover
chance over prompts, not over seeds. An option that learns faster leads early and need not lead
later.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.files import write_json
from draftlab.heads.folder import load_head
from draftlab.heads.head import DraftHead
from draftlab.pipeline.pipeline import Pipeline
from draftlab.progress import Monitor
from draftlab.recipe.recipe import Recipe, load_recipe
from draftlab.run.stages import STAGES
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.text.chat_template import stop_ids
from draftlab.text.suites import load_suite
from eval.measurements import (
    Measurements,
    PrintMonitor,
    add_options,
    bootstrap_interval,
    option_values,
)

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
BASE = "recipe"
GREEDY = Sampling()


@dataclass(frozen=True)
class Result:
    """The figures of a variant with one seed.

    Attributes:
        name: the changed settings; `BASE` without any.
        prompts: int64 [P, 2], drafts and accepted drafts of each prompt.
        accepted_at: accepted drafts by position, over all prompts.
    """

    name: str
    parameters: int
    dtype: str
    device: str
    train_s: float
    tokens_seen: int
    alpha: list[float]
    prompts: np.ndarray
    accepted_at: list[int]

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Result:
        return cls(**fields | {"prompts": np.array(fields["prompts"])})

    @property
    def fields(self) -> dict[str, Any]:
        return vars(self) | {"prompts": self.prompts.tolist()}

    def al(self, index: np.ndarray | slice = slice(None)) -> float:
        drafts, accepted = self.prompts[index].sum(0)
        return 1 + accepted / drafts


def folder_name(name: str, seed: int) -> str:
    """Return the name of a variant's run folder."""
    words = [re.sub(r"[^A-Za-z0-9.-]+", "-", word).strip("-") for word in name.split()]
    return "-".join([*words, f"seed{seed}"])


def share_stages(base: Path, folder: Path, *, store: bool, seed: int) -> None:
    """Copy the base run's answers into a new run, and its store where it would be equal.

    The stage records get the new run's seed, which is to change its training only.
    """
    if folder.exists():
        return
    (folder / "stages").mkdir(parents=True)
    made = {"answers": "answers.json"} | ({"store": "store"} if store else {})
    for stage, beside in made.items():
        for name in {STAGES[stage].artefact, beside, f"stages/{stage}.json"}:
            copy = shutil.copytree if (base / name).is_dir() else shutil.copy
            copy(base / name, folder / name)
        record = folder / "stages" / f"{stage}.json"
        stages = json.loads(record.read_text())
        write_json(record, stages | {"inputs": stages["inputs"] | {"seed": seed}})
    shutil.copy(base / "recipe.yaml", folder / "recipe.yaml")


def measure(
    name: str, seed: int, options: argparse.Namespace, target: Target, tokenizer: Any
) -> dict[str, Any]:
    """Train a variant and decode with it at T = 0; return the fields of its `Result`."""
    changes, runs = () if name == BASE else name.split(), options.out
    own = [f"name={folder_name(name, seed)}", f"seed={seed}"]
    recipe = load_recipe(options.recipe, [*options.settings, *changes, *own])
    folder, base = runs / recipe.name, runs / folder_name(BASE, options.seeds[0])
    if folder != base:
        share_stages(base, folder, store="record." not in name, seed=seed)
    pipeline = Pipeline(recipe, PrintMonitor(), runs)
    pipeline.make("store")
    started = time.perf_counter()
    pipeline.make("head")
    seconds = time.perf_counter() - started
    head, counters = decode(folder / "head", recipe, target, tokenizer, options.prompts, options.k)
    provenance = head.config.provenance
    weights = head.named_parameters()
    return Result(
        name,
        sum(p.numel() for n, p in weights if n not in head.shared_tensors()),
        str(target.dtype).removeprefix("torch."),
        torch.cuda.get_device_name() if target.device.type == "cuda" else "CPU",
        seconds,
        provenance["tokens_seen"],
        provenance["validation"]["alpha"],
        np.array([[c.drafts, c.accepted] for c in counters]),
        np.sum([c.accepted_at for c in counters], 0).tolist(),
    ).fields


def decode(
    folder: Path,
    recipe: Recipe,
    target: Target,
    tokenizer: Any,
    prompts: int,
    k: int,
    sampling: Sampling = GREEDY,
) -> tuple[DraftHead, list[Counters]]:
    """Decode a recipe's first held-out prompts with a head; return it and each prompt's counters.

    Above T = 0 drafts are sampled from the head.
    """
    shared = target.parts.shared_tensors
    head = load_head(folder, target_tensors=shared, dtype=target.dtype, device=target.device)
    longest = target.max_length - recipe.eval.max_new_tokens
    suite = load_suite(
        (recipe.eval.suite or ("embedded:heldout",))[0],
        tokenizer,
        Monitor(),
        max_prompt_tokens=longest,
        modes=recipe.target.modes,
    )
    stops = stop_ids(tokenizer, target.folder)
    requests = [
        Request(i, ids, recipe.eval.max_new_tokens, sampling, stops)
        for i, ids in suite.prompts[:prompts]
    ]
    engine = Engine(
        target,
        new_drafter(head, k, draft_probs=sampling.temperature > 0),
        batch=recipe.eval.batch,
        max_length=target.max_length,
        cpu_prepacked=True,
    )
    done = {g.id: g.counters for g in engine.generate(requests)}
    return head, [done[request.id] for request in requests]


def mean_al(results: Sequence[Result], index: np.ndarray | slice = slice(None)) -> float:
    """Return the mean of the seeds' AL over some prompts."""
    return float(np.mean([result.al(index) for result in results]))


def row(results: Sequence[Result], base: Sequence[Result]) -> str:
    """Return a variant's line of the table, from its results with every seed."""
    first, num_prompts = results[0], len(results[0].prompts)

    def interval(statistic: Callable[[np.ndarray], float]) -> tuple[float, float]:
        return bootstrap_interval(statistic, num_prompts, samples=10_000)

    low, high = interval(lambda index: mean_al(results, index))
    alpha = np.mean([result.alpha for result in results], 0)
    cells = [
        first.name,
        f"{first.parameters / 1e6:.2f} M",
        " ".join(f"{a:.3f}" for a in alpha),
        f"{mean_al(results):.3f} [{low:.3f}, {high:.3f}]",
        " ".join(f"{result.al():.3f}" for result in results),
    ]
    if first.name == BASE:
        cells.append("")
    else:
        low, high = interval(lambda index: mean_al(results, index) - mean_al(base, index))
        mark = "" if low <= 0 <= high else "**"
        difference = mean_al(results) - mean_al(base)
        cells.append(f"{mark}{difference:+.3f} [{low:+.3f}, {high:+.3f}]{mark}")
    drafts, accepted = np.sum([result.prompts.sum(0) for result in results], 0)
    at = np.sum([result.accepted_at for result in results], 0).tolist()
    seconds = np.mean([result.train_s for result in results])
    cells += [f"{drafts:,}", f"{accepted:,}", f"{at}", f"{seconds:.0f}"]
    return "| " + " | ".join(cells) + " |"


COLUMNS = (
    "changed | parameters | α of validation by step | AL [95 %] | AL by seed"
    " | difference to base [95 %, paired] | drafts | accepted | accepted at 1, 2, … | training s"
)


def table(variants: Sequence[Sequence[Result]]) -> str:
    """Return the table of all variants; the intervals of bold differences exclude 0."""
    lines = [f"| {COLUMNS} |", "|---" * len(COLUMNS.split(" | ")) + "|"]
    return "\n".join([*lines, *(row(results, variants[0]) for results in variants)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="what variants change")
    parser.add_argument("--out", type=Path, default=Path("runs/options"), help="folder of the runs")
    parser.add_argument("--change", nargs="*", default=[], help='such as "train.loss=lk"')
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of training")
    parser.add_argument("--prompts", type=int, default=128, help="first held-out prompts")
    parser.add_argument("--k", type=int, default=4, help="drafts a step")
    parser.add_argument("settings", nargs="*", help="changed in every run: train.steps=100 …")
    add_options(parser)
    options = parser.parse_args(arguments)
    options.results = options.results or options.out / "results.json"
    recipe = load_recipe(options.recipe, options.settings)
    target, tokenizer = load_target(recipe.target), load_tokenizer(recipe.target)
    conditions = option_values(options, "recipe", "prompts", "k", "settings")
    parts = Measurements(options, conditions, target.device)
    results: dict[str, list[Result]] = {}
    for name, seed in product((BASE, *options.change), options.seeds):
        run = partial(measure, name, seed, options, target, tokenizer)
        result = Result.of(parts.measure(folder_name(name, seed), run))
        results.setdefault(name, []).append(result)
        print(f"{name}, seed {seed}: AL {result.al():.3f}", flush=True)
    variants = list(results.values())
    first = variants[0][0]
    print(f"{first.dtype}, {first.device}; training saw {first.tokens_seen:,} tokens")
    print(table(variants))


if __name__ == "__main__":
    main()
