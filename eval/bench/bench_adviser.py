"""How well the K adviser predicts speed-ups: every K is predicted from the others, at each batch.

    python eval/bench/bench_adviser.py --out adviser.json
    python eval/bench/bench_adviser.py --targets small:float32 --batches 1,4 --k 1,2,3,4

Plain decoding and K = 1 … 8 are timed as in `draftlab eval --timing-batches`, on random targets
with synthetic acceptance (bench_load.py). Each K between the smallest and the largest is then left
out at all batches, and the adviser predicts its speed-up from the rest (docs/methods.md §6.2). A
prediction is close if its error is at most 5 %, or if it lies in a measured interval of ± 5 % or
less.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from bench_load import load_workload
from synthetic_workload import print_table, synthetic_engine

from draftlab.evaluate.advice_check import check_left_out, check_summary
from draftlab.evaluate.cost_model import Shape, find_cliffs
from draftlab.evaluate.measure import shared_pool
from draftlab.evaluate.metrics import device_name
from draftlab.evaluate.results import Timing
from draftlab.evaluate.speedup_model import Measured, SpeedupTable
from draftlab.evaluate.workload import Workload
from draftlab.files import write_json


def measure(workload: Workload) -> dict[Shape, Timing]:
    """Return the times of every K at every timed batch."""
    pool, timings = shared_pool(workload), {}
    for batch in workload.settings.timing_batches:
        started = time.perf_counter()
        engines = {
            config: synthetic_engine(workload, config, batch, pool, expect=False)
            for config in workload.configs
        }
        runs = workload.time(engines, 0.0, batch, "draftlab")
        for config in engines:
            if (timing := workload.timing(runs, config, batch)) is not None:
                timings[batch, config.k] = timing
        print(f"batch {batch}: {time.perf_counter() - started:.0f} s", flush=True)
    return timings


def check(timings: dict[Shape, Timing]) -> dict[str, Any]:
    """Print measured and predicted speed-ups and cliffs; return all figures."""
    measured = {
        shape: one
        for shape, timing in timings.items()
        if (one := Measured.from_timing(timing)) is not None
    }
    steps = {shape: one.step_ms for shape, one in measured.items()}
    table = SpeedupTable(False, measured, steps)
    checks = {shape: one for shape in measured if (one := check_left_out(table, *shape))}
    ks = sorted({k for _, k in measured})
    rows = []
    for batch in table.batches:
        rows.append([f"{batch}, step ms", *(f"{steps[batch, k]:.3f}" for k in ks)])
        rows.append(
            [
                "   speed-up (error %)",
                *(
                    f"{measured[batch, k].speedup or 1:.3f}"
                    + (f" ({100 * checks[batch, k].error:+.1f})" if (batch, k) in checks else "")
                    for k in ks
                ),
            ]
        )
    print_table(["batch", *(f"K = {k}" for k in ks)], rows)
    summary = check_summary([*checks.values()])
    print(f"{summary['close']} of {summary['timed']} predictions within 5 %; {summary['text']}")
    for cliff in find_cliffs(steps):
        print(f"warning: {cliff.text}")
    return {
        "timings": [
            {"k": k, "left_out": vars(checks[batch, k]) if (batch, k) in checks else None}
            | timing.model_dump(mode="json")
            for (batch, k), timing in timings.items()
        ],
        "check": summary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="8b:bfloat16,small:float32,small:bfloat16")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--k", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--prompts", type=int, default=8, help="timed ones, at least a batch")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, help="a JSON file that gets all figures")
    arguments = parser.parse_args()
    device, started, results = torch.device(arguments.device), time.perf_counter(), {}
    print(f"{device_name(device)}, torch {torch.__version__}")
    for name in arguments.targets.split(","):
        target, _, dtype = name.partition(":")
        print(f"{target} in {dtype}")
        workload = load_workload(
            target,
            dtype,
            device,
            k=arguments.k,
            timing_batches=arguments.batches,
            timing_prompts=arguments.prompts,
            timing_tokens=arguments.tokens,
            max_new_tokens=arguments.tokens,
            prompt_tokens=arguments.prompt_tokens,
        )
        results[name] = check(measure(workload))
        print(f"{time.perf_counter() - started:.0f} s since the start", flush=True)
    if arguments.out:
        conditions = {name: str(value) for name, value in vars(arguments).items()}
        facts = {"device": device_name(device), "torch": torch.__version__}
        write_json(arguments.out, {"conditions": conditions | facts, "results": results})


if __name__ == "__main__":
    main()
