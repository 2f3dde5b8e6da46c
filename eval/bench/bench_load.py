"""Goodput under load: plain decoding and every K, at each number of requests that always run.

    python eval/bench/bench_load.py --results load.json

The 8B target has the shapes of Llama-3.1-8B, random weights and an EAGLE3 chain of one layer; draft
i passes with probability 0.6 if those before it did, decided behind the real verifier
(random_models.py). The small target has 22 M parameters. Goodput, TPOT and TTFT are those of
`draftlab eval --concurrency` (docs/methods.md §6.2), by the same code. All configurations take
turns in every round, of which there are `--rounds` or more: each configuration is measured for
`--seconds` at least. Graphs are captured before.

It prints a table of goodput in tokens/s with the best of each concurrency, and how well each K is
predicted from the others.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from random_models import (
    HEADS,
    SMALL_HEAD,
    passing_runs,
    random_head,
    random_target,
    synthetic_verify,
)

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.engine.engine import Engine
from draftlab.evaluate.adviser import advise
from draftlab.evaluate.decoding_config import PLAIN_DECODING, DecodingConfig, NamedHead
from draftlab.evaluate.measure import new_engine, pool_warnings, shared_pool
from draftlab.evaluate.results import LoadPoint
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import Decoder
from draftlab.evaluate.warnings import with_slow_step_warnings
from draftlab.evaluate.workload import Workload
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.text.suites import Suite
from eval.measurements import Measurements, add_options, print_table, require

TARGETS = {"8b": "llama", "small": "small"}


def load_workload(target: str, device: torch.device, **settings: Any) -> Workload:
    """Return the workload of a target's name; `settings` are those of `EvalSettings`."""
    prompt_tokens = settings.pop("prompt_tokens")
    loaded = random_target(device, TARGETS[target])
    changed = HEADS["chain"] | (SMALL_HEAD if target == "small" else {})
    head = random_head(loaded, device, **changed)
    return synthetic_workload(loaded, head, prompts=64, prompt_tokens=prompt_tokens, **settings)


def synthetic_workload(
    target: Target, head: DraftHead, *, prompts: int, prompt_tokens: int, **settings: Any
) -> Workload:
    """Return a workload of random prompts at T = 0, whose answers end at the token limit alone."""
    generator = torch.Generator().manual_seed(0)
    vocab = len(target.parts.embeddings)
    ids = torch.randint(10, vocab, (prompts, prompt_tokens), generator=generator).tolist()
    suite = Suite("random", "", tuple((f"r{i}", tuple(row)) for i, row in enumerate(ids)))
    chosen = EvalSettings.model_validate({"temperatures": 0.0, "packed": False} | settings)
    heads = (NamedHead("chain", head),)
    return Workload(target, heads, suite, frozenset(), chosen, Monitor())


def synthetic_engine(
    workload: Workload, config: DecodingConfig, batch: int, pool: PagedCache | None
) -> Decoder:
    """Return the evaluation's engine for a configuration, with synthetic acceptance."""
    passing_runs(workload.target.device)  # not inside a graph's capture
    engine = new_engine(workload, config, batch, pool, expect=False)
    assert isinstance(engine, Engine)
    if config.head is not None:
        engine.step.verifier = synthetic_verify
    return engine


def measure(
    new_workload: Callable[[], Workload],
    concurrency: Sequence[int],
    parts: Measurements,
    *,
    rounds: int,
    seconds: float,
) -> list[LoadPoint]:
    """Measure every configuration at every concurrency; print the seconds that each took."""
    points: list[LoadPoint] = []

    @cache
    def loaded() -> tuple[Workload, PagedCache | None]:
        workload = new_workload()
        return workload, shared_pool(workload)

    for number in concurrency:

        def part(number: int = number) -> dict[str, Any]:
            (workload, pool), started = loaded(), time.perf_counter()
            (t,) = workload.settings.temperatures
            engines = {
                config: synthetic_engine(workload, config, number, pool)
                for config in workload.configs_at(t)
            }
            options = {"rounds": rounds, "least_s": seconds}
            runs = workload.load_runs(engines, t, number, "draftlab", **options)
            measured_s = sum(run.seconds for run in runs.values())
            print(
                f"{number} at once took {time.perf_counter() - started:.0f} s, {measured_s:.0f} of "
                f"them measured in {len(runs[PLAIN_DECODING].rounds)} rounds",
                flush=True,
            )
            measured = workload.load_points(runs, t, number, "draftlab")
            warnings = pool_warnings(workload, pool, number)
            return {
                "points": [
                    p.model_copy(update={"warnings": p.warnings + warnings}).model_dump(mode="json")
                    for p in measured
                ]
            }

        results = parts.measure(f"{number} at once", part)
        measured = [LoadPoint.model_validate(p) for p in results["points"]]
        texts = (
            f"{p.configuration} {p.goodput_tok_s:,.0f} (AL {p.acceptance_length or 1:.2f}, "
            f"{p.step_ms or 0:.2f} ms)"
            for p in measured
        )
        print(f"{number} at once: {'; '.join(texts)}", flush=True)
        points += measured
    return with_slow_step_warnings(points)


def show(points: Sequence[LoadPoint]) -> None:
    """Print the table of goodput and the warnings."""
    columns = sorted({point.concurrency for point in points})
    best = {
        max((p.goodput_tok_s, p.concurrency) for p in points if p.concurrency == c) for c in columns
    }
    rows = []
    for name in dict.fromkeys(point.configuration for point in points):
        at = {point.concurrency: point for point in points if point.configuration == name}
        rows.append([name])
        for c in columns:
            text = f"{at[c].goodput_tok_s:,.0f}"
            text += f" ({at[c].speedup:.3f})" if at[c].speedup else ""
            rows[-1].append(text + " *" * ((at[c].goodput_tok_s, c) in best))
    print_table(["tokens/s", *map(str, columns)], rows)
    for point in points:
        for text in point.warnings:
            print(f"warning: {point.configuration}: {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, default="8b")
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64", help="at most 64")
    parser.add_argument("--k", default="1,3,5,7")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of random prompts")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--requests", type=int, default=16, help="measured ones, at least")
    parser.add_argument("--rounds", type=int, default=4, help="of all configurations, at least")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measured, at least")
    parser.add_argument("--device", default="cuda")
    add_options(parser)
    arguments = parser.parse_args()
    device, started = torch.device(arguments.device), time.perf_counter()
    require(gpus=int(device.type == "cuda"))
    conditions = dict(vars(arguments))
    for name in ("device", "results", "concurrency"):
        conditions.pop(name)
    parts = Measurements(arguments, conditions, device)
    concurrency = [int(number) for number in arguments.concurrency.split(",")]

    def new_workload() -> Workload:
        return load_workload(
            arguments.target,
            device,
            k=arguments.k,
            concurrency=arguments.concurrency,
            timing_prompts=arguments.requests,
            timing_tokens=arguments.tokens,
            max_new_tokens=arguments.tokens,
            prompt_tokens=arguments.prompt_tokens,
        )

    points = measure(
        new_workload,
        concurrency,
        parts,
        rounds=arguments.rounds,
        seconds=arguments.seconds,
    )
    show(points)
    adviser = advise([], load=points) or {}
    print(adviser.get("check", {}).get("text", "no advice"))
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
