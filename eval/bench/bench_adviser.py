"""How well the K adviser predicts speed-ups: every K is predicted from the others, at each batch.

    python eval/bench/bench_adviser.py --results adviser.json
    python eval/bench/bench_adviser.py --targets small:float32 --batches 1,4 --k 1,2,3,4

Plain decoding and K = 1 … 8 are timed as in `draftlab eval --timing-batches`, on random targets
with synthetic acceptance (bench_load.py), in `--rounds` rounds or more, in which all configurations
decode a batch in turn. Times are medians over rounds: a disturbance of the machine, which may take
as long as hundreds of short steps, spoils a round and not the result. Rounds that took much longer
are counted.

Each K between the smallest and the largest is then left out at all batches, and the adviser
predicts its speed-up from the rest (docs/methods.md §6.2). A prediction is close if its error is at
most 5 %, or if it lies in a measured interval of ± 5 % or less.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_load import load_workload, with_pool
from synthetic_workload import synthetic_engine

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.evaluate.advice_check import check_left_out, check_summary
from draftlab.evaluate.cost_model import Shape, find_cliffs
from draftlab.evaluate.decoding_config import PLAIN_DECODING, DecodingConfig
from draftlab.evaluate.metrics import without_disturbed
from draftlab.evaluate.results import Timing
from draftlab.evaluate.speedup_model import Measured, SpeedupTable
from draftlab.evaluate.timing import TimedRun
from draftlab.evaluate.warnings import summarize_cliffs
from draftlab.evaluate.workload import Workload
from draftlab.intervals import bootstrap_interval
from eval.measurements import Measurements, add_options, print_table, require

LATE = 1.5
"""A round whose steps took so many times the median was disturbed."""


def measure(
    new_workload: Callable[[], Workload],
    batches: Sequence[int],
    parts: Measurements,
    name: str,
    *,
    rounds: int,
) -> dict[Shape, Timing]:
    """Return the times of every K at every batch.

    Args:
        name: of the target, which starts the names of its parts.
        rounds: least batches that every configuration decodes.
    """
    loaded, timings = with_pool(new_workload), {}
    for batch in batches:

        def part(batch: int = batch) -> list[dict[str, Any]]:
            (workload, pool), started = loaded(), time.perf_counter()
            prompts = max(workload.settings.timing_prompts, rounds * batch)
            settings = workload.settings.model_copy(update={"timing_prompts": prompts})
            workload = replace(workload, settings=settings)
            engines = {
                config: synthetic_engine(workload, config, batch, pool, expect=False)
                for config in workload.configs
            }
            runs = workload.time(engines, 0.0, batch, "draftlab")
            print(f"batch {batch}: {time.perf_counter() - started:.0f} s", flush=True)
            return [
                {"k": config.k, "timing": timing.model_dump(mode="json")}
                for config in engines
                if (timing := median_timing(workload, runs, config, batch)) is not None
            ]

        found = parts.measure(f"{name}, batch {batch}", part) or ()
        timings |= without_disturbed(
            {(batch, one["k"]): Timing.model_validate(one["timing"]) for one in found}
        )
    return timings


def median_timing(
    workload: Workload, runs: Mapping[DecodingConfig, TimedRun], config: DecodingConfig, batch: int
) -> Timing | None:
    """Return a configuration's times, medians over rounds, and their intervals over rounds.

    Acceptance is that of all rounds.
    """
    whole = workload.timing(runs, config, batch, None)
    if whole is None or whole.step_ms is None:
        return whole
    ms, tokens, steps = round_sums(runs[config], batch)
    plain_ms, plain_tokens, plain_steps = round_sums(runs[PLAIN_DECODING], batch)
    step_ms, tpot_ms, plain_tpot_ms = ms / steps, ms / tokens, plain_ms / plain_tokens
    late = step_ms / np.median(step_ms)
    if late.max() > LATE:
        print(
            f"batch {batch}, K = {config.k}: {(late > LATE).sum()} of {len(late)} rounds took more "
            f"than {LATE} times the median, {late.max():.1f} times at most"
        )

    def interval(values: np.ndarray) -> tuple[float, float]:
        return bootstrap_interval(lambda index: float(np.median(values[index])), len(values))

    changes: dict[str, Any] = {
        "step_ms": float(np.median(step_ms)),
        "tpot_ms": float(np.median(tpot_ms)),
        "tpot_ms_ci": interval(tpot_ms),
    }
    if config != PLAIN_DECODING:
        speedups = plain_tpot_ms / tpot_ms
        changes |= {
            "baseline_tpot_ms": float(np.median(plain_tpot_ms)),
            "speedup": float(np.median(speedups)),
            "speedup_ci": interval(speedups),
            "step_ratio_ci": interval(step_ms / (plain_ms / plain_steps)),
        }
    return whole.model_copy(update=changes)


def round_sums(run: TimedRun, batch: int) -> np.ndarray:
    """Return the milliseconds, tokens and steps after first tokens of each round, [3, rounds]."""
    answers = [
        (1e3 * (g.total_s - g.first_token_s), len(g.token_ids) - 1, len(g.steps))
        for g in run.generations
    ]
    return np.array(answers).reshape(-1, batch, 3).sum(1).T


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
    for _, text in summarize_cliffs(find_cliffs(steps)):
        print(f"warning: {text}")
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", default="8b:bfloat16,small:float32,small:bfloat16")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--k", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--prompts", type=int, default=8, help="timed ones, at least")
    parser.add_argument("--rounds", type=int, default=7, help="timed batches, at least")
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
    parts = Measurements(arguments, sizes | {"rounds": arguments.rounds}, device)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for name in arguments.targets.split(","):
        target, _, dtype = name.partition(":")
        print(f"{target} in {dtype}")

        def new_workload(target: str = target, dtype: str = dtype) -> Workload:
            sized = sizes | {"timing_batches": arguments.batches}
            return load_workload(target, dtype, device, **sized)

        timings = measure(new_workload, batches, parts, name, rounds=arguments.rounds)
        if timings:
            check(timings)
        print(f"{time.perf_counter() - started:.0f} s since the start", flush=True)


if __name__ == "__main__":
    main()
