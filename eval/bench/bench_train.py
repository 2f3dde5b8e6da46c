"""Time training steps by phase, beside other trainers.

    python eval/bench/bench_train.py                        # Llama-3.1-8B's shapes, one JSON line
    python eval/bench/bench_train.py --prompt 0             # no position of a prompt
    python eval/bench/bench_train.py --precision fp8        # products in 8 bits
    python eval/bench/bench_train.py --rows 1 --row-tokens 32768 --window 2048  # a long context
    python eval/bench/bench_train.py --peer speculators     # or specforge; prints the ratio
    python eval/bench/bench_train.py --family peagle --layers 2  # a parallel head, 8 depths
    python eval/bench/bench_train.py --family dspark        # a block head of 7 slots; or dflash2
    python eval/bench/bench_train.py --shape embedded --family peagle --layers 4  # a small head
    python eval/bench/bench_train.py --shape tiny --device cpu
    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 eval/bench/bench_train.py --parallel fsdp2

Features are random but fixed. The code that `draftlab train` runs is timed; the batch is on the
device beforehand. Times are the GPU's own, from events between the phases; on a CPU they are the
host's. With torchrun every GPU does the same work, and counts are reduced as in training; some
hosts lack NCCL's multicast, which the variable turns off.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
from train_peers import PEERS, peer_seconds
from train_work import (
    FAMILIES,
    SHAPES,
    Work,
    in_family,
    new_work,
    step_weights,
    timed_steps,
    train_settings,
)

from draftlab.train.checkpoint import trainable
from draftlab.train.distributed.backends import DistillationModule, wrap
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.flops import StepWork, matrix_rate, mean_context
from draftlab.train.metrics import PhaseTimer, peak_memory
from eval.measurements import Measurements, add_options, require

RATE = 1e-4
DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.bfloat16, "float32": torch.float32}


def timed(work: Work, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of a step and its phases, speed and memory."""
    device, dtype = ranks.device, DTYPES[options.precision]
    changes = {"precision": options.precision, "parallel": options.parallel}
    settings = train_settings(work.shape, **changes)
    distillation = DistillationModule(work.head, work.target, settings, dtype)
    print(f"how steps are run: {distillation.description}", file=sys.stderr)
    whole, batch = wrap(distillation, settings, ranks), work.packed(device).to(device)

    def step(clock: PhaseTimer) -> None:
        counts = ranks.all_reduce(torch.tensor(batch.counts)).tolist()
        weights = step_weights(work.shape.family, counts)
        loss, _ = whole.forward(batch, weights, reduce=True)
        clock.mark("forward")
        whole.backward(loss, counts[0])
        clock.mark("backward")
        whole.step(RATE)
        clock.mark("optimizer")

    seconds, phases = timed_steps(step, device, options.warmup, options.repeats)
    trained = trainable(whole.head)
    if broken := [name for name, p in trained.items() if not bool(p.isfinite().all())]:
        raise RuntimeError(f"weights that are not finite after the steps: {', '.join(broken)}")
    shape, ceiling = work.shape, matrix_rate(device, dtype)
    context = mean_context([shape.row_tokens])
    counted = StepWork(shape.tokens, batch.counts, batch.num_teachers, context)
    flops = whole.head.family.objective().flops(whole.head, counted) / shape.tokens
    return {
        "engine": "draftlab",
        "processes": ranks.size,
        "shape": asdict(shape),
        "step_ms": 1e3 * seconds,
        "phases_ms": phases,
        "tokens_per_s": ranks.size * shape.tokens / seconds,
        "loss_tokens_per_s": batch.num_anchors / seconds,
        "predictions_per_s": sum(batch.counts) / seconds,
        "predictions": batch.counts,
        "trained_parameters": sum(p.numel() for p in trained.values()),
        "gflop_a_token": flops / 1e9,
        "ceiling_tflops": ceiling / 1e12,
        "mfu": shape.tokens / seconds * flops / ceiling,
        "peak_gib": peak_memory(device) / 2**30,
    }


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--family", choices=FAMILIES, default="eagle3")
    for name, value in vars(SHAPES["8b"]).items():
        if name != "family":
            flag = f"--{name.replace('_', '-')}"
            parser.add_argument(flag, type=type(value), help="replaces the shape's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=6, help="measurements of four steps")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--parallel", default="ddp", help="as train.parallel, with torchrun")
    parser.add_argument("--peer", choices=PEERS)
    add_options(parser)
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> dict[str, Any]:
    options = arguments(words)
    require(gpus=int(options.device == "cuda"))
    ranks = Ranks.join(options.device)
    device = ranks.device
    shape = in_family(SHAPES[options.shape], options.family)
    chosen = {name: getattr(options, name) for name in vars(shape)}
    shape = replace(shape, **{name: value for name, value in chosen.items() if value is not None})
    own = {"precision": options.precision, "parallel": options.parallel, "processes": ranks.size}
    conditions = asdict(shape) | own
    parts = Measurements(options, conditions, device)

    @cache
    def work() -> Work:
        return new_work(shape, device, DTYPES[options.precision])

    row = parts.measure("draftlab", lambda: timed(work(), ranks, options))
    if ranks.is_main:
        show(row)
    ranks.leave()
    if options.peer:
        peer = options.peer
        beside = show(parts.measure(peer, lambda: peer_seconds(peer, work(), device, options)))
        speeds = [name for name in ("tokens_per_s", "predictions_per_s") if name in beside]
        show({f"{name}, of the peer's": row[name] / beside[name] for name in speeds})
    return row


def show(row: dict[str, Any]) -> dict[str, Any]:
    """Print the results of a part as a line of JSON; return them."""
    print(json.dumps(row), flush=True)
    return row


if __name__ == "__main__":
    main()
