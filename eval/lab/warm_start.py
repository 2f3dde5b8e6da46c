"""Measure how many steps a head saves that starts from one of an older target (`head.init`).

    python eval/lab/warm_start.py --out runs/warm_start

The newer target is the embedded one, tuned for some hundred steps on functions of Python's standard
library, as answers to the prompts that the embedded target knows. A head is trained for the older
target and one from scratch for the newer, by the quickstart's recipe. Then heads start from the
older target's head and train for 0, 5, 20 and 100 % of the steps on the newer target's states.
Finished parts are not repeated.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from options import decode, share_stages
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.counters import Counters
from draftlab.evaluate.statistics import acceptance_interval
from draftlab.pipeline.pipeline import Pipeline
from draftlab.pipeline.recipe import Recipe, load_recipe
from draftlab.pipeline.resolve import find_head
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.locate import resolve_target
from draftlab.target_model.settings import TargetSettings
from eval.measurements import PrintMonitor

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SHARES = (0.05, 0.2, 1.0)
"""Of the recipe's steps; beside them 0, the older target's head as it is."""


def functions() -> Iterator[list[dict[str, str]]]:
    """Yield a conversation for each documented function of Python's standard library."""
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or ast.get_docstring(node) is None:
                continue
            source = ast.get_source_segment(text, node) or ""
            head = source[: source.find('"""', source.find('"""') + 3) + 3]
            if 80 < len(source) < 1500 and len(head) > 10:
                prompt = f"Write this Python function:\n\n```python\n{head}\n```"
                answer = f"```python\n{source}\n```"
                yield [
                    {"role": "user", "content": prompt},
                    {"role": "assistant", "content": answer},
                ]


def tune(folder: Path, steps: int) -> None:
    """Write a copy of the embedded target that is tuned on `functions`, loss on answers only."""
    settings = TargetSettings(path="embedded")
    source, tokenizer = resolve_target(settings), load_tokenizer(settings)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    conversations = list(functions())
    random.Random(0).shuffle(conversations)
    for step in range(steps):
        loss = torch.zeros(())
        for chat in (conversations[(8 * step + i) % len(conversations)] for i in range(8)):
            ids, prompt = (
                tokenizer.apply_chat_template(
                    part, add_generation_prompt=opens, return_dict=False, return_tensors="pt"
                )
                for part, opens in ((chat, False), (chat[:1], True))
            )
            labels = ids.clone()
            labels[:, : prompt.shape[1]] = -100
            loss = loss + model(ids, labels=labels).loss / 8
        for group in optimizer.param_groups:
            group["lr"] = 2e-4 * min(1.0, (step + 1) / 20, (steps - step) / 50)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"tuning: step {step + 1} of {steps}, loss {loss.item():.3f}", flush=True)
    shutil.copytree(source, folder)
    model.save_pretrained(folder)


def al_of(folder: Path, recipe: Recipe, target: Any, tokenizer: Any, prompts: int) -> str:
    """Return a head's AL with its interval and counters, as cells of the table."""
    _, counters = decode(folder, recipe, target, tokenizer, prompts, 4)
    low, high = acceptance_interval(counters) or (1.0, 1.0)
    total = Counters.total(counters)
    al = total.acceptance_length or 1.0
    return f"{al:.3f} [{low:.3f}, {high:.3f}] | {total.drafts:,} | {total.accepted:,}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/warm_start"), help="folder")
    parser.add_argument("--tuning-steps", type=int, default=300, help="of the newer target")
    parser.add_argument(
        "--older", default=None, help="a head of the older target; without it the recipe trains one"
    )
    parser.add_argument("--prompts", type=int, default=128, help="first held-out prompts")
    parser.add_argument("settings", nargs="*", help="changed in every run: train.steps=100 …")
    options = parser.parse_args(arguments)
    runs, newer = options.out.absolute(), options.out.absolute() / "target"
    if not newer.exists():
        tune(newer, options.tuning_steps)

    def train(name: str, *settings: str) -> tuple[Recipe, Path, float]:
        recipe = load_recipe(RECIPE, [f"name={name}", *options.settings, *settings])
        if name.startswith("warm"):
            share_stages(runs / "scratch", runs / name, store=True, seed=recipe.seed)
        pipeline, started = Pipeline(recipe, PrintMonitor(), runs), time.perf_counter()
        pipeline.make("head")
        return recipe, runs / name / "head", time.perf_counter() - started

    older_head = find_head(options.older) if options.older else train("older")[1]
    begin = f"warm-{Path(options.older).name}" if options.older else "warm"
    recipe, scratch, seconds = train("scratch", f"target={newer}")
    target, tokenizer = load_target(recipe.target), load_tokenizer(recipe.target)
    rows = [
        ("older target's head as it is", "0", "", older_head),
        ("from scratch", "100 %", f"{seconds:.0f}", scratch),
    ]
    for share in SHARES:
        steps = max(1, round(share * recipe.train.steps))
        settings = (f"target={newer}", f"head.init={older_head}", f"train.steps={steps}")
        _, head, seconds = train(f"{begin}-{share:.0%}".rstrip("%"), *settings)
        rows.append(("from the older target's head", f"{share:.0%}", f"{seconds:.0f}", head))
    lines = [
        "| head | steps | seconds | AL [95 %] | drafts | accepted |",
        "|---|---|---|---|---|---|",
    ]
    for name, steps, took, head in rows:
        cells = al_of(head, recipe, target, tokenizer, options.prompts)
        lines.append(f"| {name} | {steps} | {took} | {cells} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
