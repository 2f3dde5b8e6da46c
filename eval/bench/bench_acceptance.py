"""Train heads of several trainers on one store and for as many tokens, and compare their AL.

    python eval/bench/bench_acceptance.py --out runs/acceptance --seeds 0 1 2
    python eval/bench/bench_acceptance.py --peers speculators --families eagle3 --tokens 2e6

The target is the embedded one; it answers the prompts once, and its states are recorded once. Ours
are the quickstart recipes with steps of 8,192 positions. The peers are trained by their own
defaults and once with our learning rate (`acceptance_peers.py`), imported by `draftlab import`, and
all heads decode the same held-out prompts with K drafts a step.

A peer that fails is left out with its reason, and the exit code is then 1; so is SpecForge without
a GPU. A finished head is not trained again. Results are in --results, by default OUT/results.json,
and in OUT/table.md. Seconds are those of the training steps; "steady" is without the first 20
steps, in which code is compiled.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftlab.heads.head import DraftHead
from draftlab.recipe.recipe import Recipe, load_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
from acceptance_peers import MODULES, PEERS, WARMUP_STEPS, Task, Trained, train_head
from options import decode, share_stages

from draftlab.engine.sampling import Sampling
from draftlab.errors import UserError
from draftlab.files import write_text
from draftlab.heads.folder import load_head
from draftlab.kernels.devices import free_memory
from draftlab.pipeline.pipeline import Pipeline
from draftlab.progress import Monitor
from draftlab.run.stages import STAGES
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.model import Target
from draftlab.train.batch.order import epoch_rows
from draftlab.train.validation import split_records
from eval.measurements import (
    Measurements,
    PrintMonitor,
    add_options,
    bootstrap_interval,
    import_error,
    option_values,
)

OUR_RATES = {"specforge": 4e-3}
"""Our learning rate for a peer's optimizer, where it is not the recipe's: AdamW on all weights."""


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


TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Result:
    """One trained head.

    Attributes:
        counters: by temperature, drafts and accepted drafts of each prompt, [P][2].
    """

    name: str
    family: str
    seed: int
    trained: Trained
    counters: dict[str, list[list[int]]]


def mean_al(results: Sequence[Result], temperature: str, index: Any = slice(None)) -> float:
    """Return the mean of the seeds' AL over some prompts."""
    values = []
    for result in results:
        drafts, accepted = np.array(result.counters[temperature])[index].sum(0)
        values.append(1 + accepted / drafts)
    return float(np.mean(values))


def interval_text(value: float, low: float, high: float, sign: str = "") -> str:
    return f"{value:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


COLUMNS = (
    "head | seeds | tokens seen | steps | trained parameters | learning rate | AL, T = 0 "
    "| to ours | AL, T = 0.8 | to ours | seconds | steady | peak GiB"
)


def table(results: Sequence[Result]) -> str:
    """Return the table. Intervals are over prompts, of the mean over the seeds of both heads."""
    lines = [f"| {COLUMNS} |", "|---" * len(COLUMNS.split("|")) + "|"]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.family, result.name), []).append(result)
    for (family, name), group in groups.items():
        ours = [r for r in groups[family, OURS] if r.seed in {g.seed for g in group}]
        trained = [r.trained for r in group]
        cells = [
            f"{name}, {family}",
            " ".join(str(r.seed) for r in group),
            f"{np.mean([t.tokens_seen for t in trained]) / 1e6:.2f} M",
            f"{np.mean([t.steps for t in trained]):.0f}",
            f"{trained[0].parameters / 1e6:.2f} M",
            f"{trained[0].learning_rate:g}",
        ]
        for temperature in map(str, TEMPERATURES):
            count = len(group[0].counters[temperature])

            def difference(index: Any, temperature: str = temperature) -> float:
                return mean_al(group, temperature, index) - mean_al(ours, temperature, index)  # noqa: B023

            def own(index: Any, temperature: str = temperature) -> float:
                return mean_al(group, temperature, index)  # noqa: B023

            everything = np.arange(count)
            cells.append(interval_text(own(everything), *bootstrap_interval(own, count)))
            ends = bootstrap_interval(difference, count)
            same = name == OURS
            cells.append("" if same else interval_text(difference(everything), *ends, "+"))
        for field in ("seconds", "steady_seconds", "peak_gib"):
            cells.append(f"{np.mean([getattr(t, field) for t in trained]):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


class Bench:
    """The runs of one comparison.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, options.out.absolute()
        self.left_out: list[str] = []
        self.peers = [peer for peer in options.peers if self.is_installed(peer)]
        self.filled = 1.0  # share of our rows' positions that are tokens
        recipe = self.recipe("eagle3", 0)
        self.base = self.out / "runs" / recipe.name
        Pipeline(recipe, PrintMonitor(), self.out / "runs").make("store")
        store = Store.open(self.base / STAGES["store"].artefact)
        indices, _ = split_records(store, recipe.train, 0, Monitor())
        lengths = np.asarray(store.lengths)[indices]
        rows = epoch_rows(lengths, options.row_tokens, seed=0, epoch=0)
        self.filled = float(lengths.sum() / (len(rows) * options.row_tokens))
        self.target: Target = load_target(recipe.target)
        self.tokenizer = load_tokenizer(recipe.target)
        names = "tokens step_tokens max_prompts row_tokens prompts k settings"
        conditions = option_values(options, *names.split())
        self.parts = Measurements(options, conditions, self.target.device)

    def is_installed(self, peer: str) -> bool:
        """Return whether a peer's modules can be imported; leave it out if they cannot."""
        if text := import_error(*MODULES[peer]):
            self.leave_out(f"{peer}: expected {text}")
        return not text

    def leave_out(self, line: str) -> None:
        self.left_out.append(line)
        print(f"left out: {line}", flush=True)

    def recipe(self, family: str, seed: int) -> Recipe:
        """Return our recipe of a family."""
        return our_recipe(self.options, self.filled, family, seed)

    def ours(self, family: str, seed: int) -> Result:
        """Train and measure a head of ours."""

        def train(folder: Path) -> Trained:
            recipe = self.recipe(family, seed)
            self.make_head(recipe)
            return our_training(folder, recipe, self.head(folder / "head"))

        return self.measure(OURS, family, seed, train)

    def make_head(self, recipe: Recipe) -> None:
        """Train a head of ours on the base's store, if that is not done yet."""
        folder = self.out / "runs" / recipe.name
        if folder != self.base:
            share_stages(self.base, folder, store=True, seed=recipe.seed)
        Pipeline(recipe, PrintMonitor(), self.out / "runs").make("head")

    def peer(self, peer: str, family: str, seed: int, *, our_rate: bool) -> Result:
        """Train, import and measure a peer's head."""
        ours, recipe = self.our_folder(family, seed), self.recipe(family, seed)
        rate = OUR_RATES.get(peer, recipe.train.learning_rate) if our_rate else None

        def train(folder: Path) -> Trained:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            self.make_head(recipe)  # its result may be there without its folder
            store = Store.open(self.base / STAGES["store"].artefact)
            indices = split_records(store, recipe.train, 0, Monitor())[0].tolist()
            head = self.head(ours / "head")
            options = self.options
            sizes = options.tokens, options.step_tokens
            task = Task(store, indices, self.target, head, *sizes, seed, rate)
            return train_head(peer, family, task, folder)

        return self.measure(peer_name(peer, our_rate=our_rate), family, seed, train)

    def our_folder(self, family: str, seed: int) -> Path:
        return self.out / "runs" / run_name(OURS, family, seed)

    def head(self, folder: Path) -> DraftHead:
        return load_head(
            folder,
            target_tensors=self.target.parts.shared_tensors,
            dtype=self.target.dtype,
            device=self.target.device,
        )

    def measure(self, name: str, family: str, seed: int, train: Any) -> Result:
        """Return a head's result; train and decode with it if that is not done yet."""
        run = run_name(name, family, seed)
        fields = self.parts.measure(run, lambda: self.new_result(name, family, seed, train))
        result = Result(**fields | {"trained": Trained(**fields["trained"])})
        print(f"{run}: AL {mean_al([result], '0.0'):.3f} at T = 0, {result.trained}", flush=True)
        return result

    def new_result(self, name: str, family: str, seed: int, train: Any) -> dict[str, Any]:
        """Train and decode with a head; return the fields of its result."""
        folder = self.out / "runs" / run_name(name, family, seed)
        print(f"--- {name}, {family}, seed {seed}", flush=True)
        if self.target.device.type == "cuda":
            free_memory()
            torch.cuda.reset_peak_memory_stats(self.target.device)
        trained, options, counters = train(folder), self.options, {}
        recipe = self.recipe(family, seed)
        for temperature in TEMPERATURES:
            _, found = decode(
                folder / "head",
                recipe,
                self.target,
                self.tokenizer,
                options.prompts,
                options.k,
                Sampling(temperature),
            )
            counters[str(temperature)] = [[c.drafts, c.accepted] for c in found]
        return asdict(Result(name, family, seed, trained, counters))

    def results(self) -> Iterator[Result]:
        """Yield all heads' results."""
        options = self.options
        for seed, family in product(options.seeds, options.families):
            yield self.ours(family, seed)
            for peer, our_rate in product(self.peers, (rate == "ours" for rate in options.rates)):
                if family not in PEERS[peer][1]:
                    continue
                try:
                    yield self.peer(peer, family, seed, our_rate=our_rate)
                except Exception as error:  # another program's failure; the others go on
                    if not isinstance(error, UserError):
                        traceback.print_exc()
                    name = peer_name(peer, our_rate=our_rate)
                    self.leave_out(f"{name}, {family}, seed {seed}: {error}")


def peer_name(peer: str, *, our_rate: bool) -> str:
    return f"{peer}, our learning rate" if our_rate else peer


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/acceptance"), help="folder")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    rates = ["default", "ours"]
    parser.add_argument("--rates", nargs="+", choices=rates, default=rates, help="of peers")
    parser.add_argument("--families", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of training")
    parser.add_argument("--tokens", type=float, default=4e6, help="tokens of a training")
    parser.add_argument("--step-tokens", type=int, default=8192, help="positions of a step")
    parser.add_argument("--max-prompts", type=int, default=3000, help="prompts to answer")
    parser.add_argument("--row-tokens", type=int, default=512, help="positions of our rows")
    parser.add_argument("--prompts", type=int, default=128, help="held-out prompts to decode")
    parser.add_argument("--k", type=int, default=4, help="drafts a step")
    parser.add_argument("settings", nargs="*", help="of the families' recipes: train.gamma=0.9 …")
    add_options(parser)
    options = parser.parse_args(arguments)
    options.results = options.results or options.out / "results.json"
    results: list[Result] = []
    bench = Bench(options)
    for result in bench.results():
        results.append(result)
        write_text(options.out / "table.md", table(results))
        print(table(results).splitlines()[-1], flush=True)
    text = table(results) + "".join(f"\nleft out: {line}\n" for line in bench.left_out)
    write_text(options.out / "table.md", text)
    print(text)
    raise SystemExit(bool(bench.left_out))


if __name__ == "__main__":
    main()
