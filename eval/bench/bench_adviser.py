"""How well the K adviser predicts speed-ups: every K is predicted from the others, at each batch.

    python eval/bench/bench_adviser.py --results adviser.json
    python eval/bench/bench_adviser.py --targets small:float32 --batches 1,4 --k 1,2,3,4

Plain decoding and K = 1 … 8 are timed as in `draftlab eval --timing-batches`, on random targets
with synthetic acceptance (bench_load.py). Each K between the smallest and the largest is then left
out at all batches, and the adviser predicts its speed-up from the rest (docs/methods.md §6.2). A
prediction is close if its error is at most 5 %, or if it lies in a measured interval of ± 5 % or
less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_load import load_workload, with_pool
from synthetic_workload import synthetic_engine

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.evaluate.advice_check import check_left_out, check_summary
from draftlab.evaluate.cost_model import Shape, find_cliffs
from draftlab.evaluate.results import Timing
from draftlab.evaluate.speedup_model import Measured, SpeedupTable
from draftlab.evaluate.workload import Workload
from eval.measurements import Measurements, add_options, print_table, require


def measure(
    new_workload: Callable[[], Workload], batches: Sequence[int], parts: Measurements, name: str
) -> dict[Shape, Timing]:
    """Return the times of every K at every batch.

    Args:
        name: of the target, which starts the names of its parts.
    """
    loaded, timings = with_pool(new_workload), {}
    for batch in batches:

        def part(batch: int = batch) -> list[dict[str, Any]]:
            (workload, pool), started = loaded(), time.perf_counter()
            engines = {
                config: synthetic_engine(workload, config, batch, pool, expect=False)
                for config in workload.configs
            }
            runs = workload.time(engines, 0.0, batch, "draftlab")
            print(f"batch {batch}: {time.perf_counter() - started:.0f} s", flush=True)
            return [
                {"k": config.k, "timing": timing.model_dump(mode="json")}
                for config in engines
                if (timing := workload.timing(runs, config, batch)) is not None
            ]

        for one in parts.measure(f"{name}, batch {batch}", part) or ():
            timings[batch, one["k"]] = Timing.model_validate(one["timing"])
    return timings


def check(timings: dict[Shape, Timing]) -> dict[str, Any]:
    """Print measured and predicted speed-ups and cliffs; return the summary of the predictions."""
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
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="8b:bfloat16,small:float32,small:bfloat16")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--k", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--prompts", type=int, default=8, help="timed ones, at least a batch")
    parser.add_argument("--device", default="cuda")
    add_options(parser)
    arguments = parser.parse_args()
    device, started = torch.device(arguments.device), time.perf_counter()
    require(gpus=int(device.type == "cuda"))
    sizes = {
        "k": arguments.k,
        "timing_prompts": arguments.prompts,
        "timing_tokens": arguments.tokens,
        "max_new_tokens": arguments.tokens,
        "prompt_tokens": arguments.prompt_tokens,
    }
    parts = Measurements(arguments, sizes, device)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for name in arguments.targets.split(","):
        target, _, dtype = name.partition(":")
        print(f"{target} in {dtype}")

        def new_workload(target: str = target, dtype: str = dtype) -> Workload:
            sized = sizes | {"timing_batches": arguments.batches}
            return load_workload(target, dtype, device, **sized)

        timings = measure(new_workload, batches, parts, name)
        if timings:
            check(timings)
        print(f"{time.perf_counter() - started:.0f} s since the start", flush=True)


if __name__ == "__main__":
    main()
