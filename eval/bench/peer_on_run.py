"""Train a head by another trainer on the store of a run, for some seconds.

    python eval/bench/peer_on_run.py runs/smollm2_eagle3 --seconds 800 --rate 4e-3 num_layers=2
    draftlab eval --head runs/smollm2_eagle3/speculators-eagle3-seed0/head --target FILE …

Records, draft vocabulary and boundaries are the run's, and so is the family. speculators' own
settings (`num_layers=2`) change its defaults; what else differs from its command is said in
`acceptance_peers.py`. A first training of some steps compiles, which takes minutes, and shows the
speed; the seconds are of steps at this speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from acceptance_peers import PEERS, WARMUP_STEPS, Task, train_head

from draftlab.files import check_new_folder
from draftlab.heads.folder import load_head
from draftlab.progress import Monitor
from draftlab.recipe.recipe import load_recipe
from draftlab.run.stages import STAGES
from draftlab.store.store import Store
from draftlab.target_model.loading import load_target
from draftlab.train.validation import split_records

PROBE_STEPS = 3 * WARMUP_STEPS


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder with a store and a head")
    parser.add_argument("--peer", choices=PEERS, default="speculators")
    parser.add_argument("--seconds", type=float, required=True, help="of training")
    parser.add_argument("--rate", type=float, help="learning rate; default: the trainer's")
    parser.add_argument("--step-tokens", type=int, default=8192, help="positions of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="of speculators: num_layers=2 …")
    options = parser.parse_intermixed_args(arguments)
    if options.settings and options.peer != "speculators":
        parser.error(f"{options.peer} takes no settings, found {options.settings}")
    if wrong := [one for one in options.settings if "=" not in one]:
        parser.error(f"expected settings such as num_layers=2, found {wrong}")
    recipe = load_recipe(options.run / "recipe.yaml")
    target = load_target(recipe.target)
    head = load_head(
        options.run / STAGES["head"].artefact,
        target_tensors=target.parts.shared_tensors,
        dtype=target.dtype,
        device=target.device,
    )
    store = Store.open(options.run / STAGES["store"].artefact)
    indices = split_records(store, recipe.train, recipe.seed, Monitor())[0].tolist()
    settings: dict[str, Any] = dict(one.split("=", 1) for one in options.settings)
    task = Task(
        store,
        indices,
        target,
        head,
        PROBE_STEPS * options.step_tokens,
        options.step_tokens,
        options.seed,
        options.rate,
        {name: yaml.safe_load(value) for name, value in settings.items()},
    )
    family = head.config.family
    out = options.run / f"{options.peer}-{family}-seed{options.seed}"
    check_new_folder(out, "rename the head of an earlier training")
    probe = PEERS[options.peer][0](family, task, out / "probe")
    print(f"probe: {probe}", flush=True)
    tokens = round(probe.tokens_seen * options.seconds / probe.steady_seconds)
    trained = train_head(options.peer, family, replace(task, tokens=tokens), out)
    print(f"{options.peer}: {trained}", flush=True)


if __name__ == "__main__":
    main()
