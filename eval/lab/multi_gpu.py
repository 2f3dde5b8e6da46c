"""Train on several GPUs: compare losses with one process's, and measure how speed scales.

    python eval/lab/multi_gpu.py                      # on 1, 2 and 4 GPUs, as available
    python eval/lab/multi_gpu.py --parallel ddp fsdp2 # without DeepSpeed's
    python eval/lab/multi_gpu.py --device cpu --shape tiny --curve-shape tiny --counts 1 2

Each backend and number of processes is measured twice:

- curve: in float32, with the same micro-batches a step whatever the number of processes. Every
  step's loss and gradient norm, and in the end every weight's sum of absolute values, must be those
  of one process that accumulates gradients (within 1e-4).
- speed: the work of `bench_train.py` on every GPU, with counts reduced as in training. Steps are
  timed between barriers. Scaling is tokens/s over the number of processes times one process's.

A line is printed for each. The program fails if curves differ, or if GPUs scale below 0.95. It
turns NCCL's multicast off (NCCL_NVLS_ENABLE=0), which some hosts lack.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from train_work import GAMMA, SHAPES, Shape, Work, new_work

from draftlab.cli.launch import launch
from draftlab.kernels.cuda_device import free_memory
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.backends import TrainBackend
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.distributed.wrap import wrap
from draftlab.train.objectives.ttt import ttt_weights
from draftlab.train.settings import TrainSettings
from eval.measurements import PrintMonitor

PARALLEL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CURVES = SHAPES | {"1b": Shape(1024, 3, 3584, 8, 2, 128, 32000, 8192, 7, 2, 512)}
CURVE_STEPS, CURVE_BOUND, SCALING_BOUND, RATE = 20, 1e-4, 0.95, 1e-4


def new_wrapped(work: Work, ranks: Ranks, parallel: str, dtype: torch.dtype) -> TrainBackend:
    """Return the head of some work, wrapped for training."""
    settings = TrainSettings(ttt_steps=work.shape.steps, parallel=parallel)
    wrapped = wrap(DistillationModule(work.head, work.target, settings, dtype), settings, ranks)
    if ranks.is_main:
        print(f"{parallel}: {wrapped.describe()}", file=sys.stderr, flush=True)
    return wrapped


def micro_batch(work: Work, number: int, rows: int) -> Work:
    """Return the micro-batch with a number."""
    records = work.records[number * rows : (number + 1) * rows]
    return replace(work, shape=replace(work.shape, rows=rows), records=records)


def curve(ranks: Ranks, parallel: str, shape: Shape, micro: int) -> dict[str, Any]:
    """Return losses and gradient norms of steps of `micro` micro-batches, spread over ranks."""
    work = new_work(replace(shape, rows=micro * shape.rows), ranks.device, torch.float32)
    wrapped = new_wrapped(work, ranks, parallel, torch.float32)
    batches = [
        micro_batch(work, number, shape.rows).packed(ranks.device).to(ranks.device)
        for number in range(ranks.rank, micro, ranks.size)
    ]
    counts = torch.tensor([batch.counts for batch in batches]).sum(0)
    weights = ttt_weights(GAMMA, counts := ranks.all_reduce(counts).tolist())
    losses, norms = [], []
    for _ in range(CURVE_STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches, 1):
            loss, _ = wrapped.forward(batch, weights, reduce=number == len(batches))
            wrapped.backward(loss, counts[0])
            total += loss.detach().double().cpu() / counts[0]
        losses.append(float(ranks.all_reduce(total)))
        norms.append(float(wrapped.step(RATE)))
    sums = {name: float(p.double().abs().sum()) for name, p in wrapped.weights().items()}
    wrapped.close()
    return {"losses": losses, "norms": norms, "weights": sums}


def speed(ranks: Ranks, parallel: str, shape: Shape, steps: int) -> dict[str, Any]:
    """Return the speed of steps in which every rank has a batch of the shape."""
    on_gpu = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    work = new_work(shape, ranks.device, dtype)
    wrapped = new_wrapped(work, ranks, parallel, dtype)
    batch = work.packed(ranks.device).to(ranks.device)
    started = 0.0
    for number in range(-5, steps):
        if number == 0:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            ranks.all_gather(None)
            started = time.perf_counter()
        counts = ranks.all_reduce(torch.tensor(batch.counts)).tolist()
        loss, _ = wrapped.forward(batch, ttt_weights(GAMMA, counts), reduce=True)
        wrapped.backward(loss, counts[0])
        wrapped.step(RATE)
    if on_gpu:
        torch.cuda.synchronize()
    ranks.all_gather(None)
    seconds = (time.perf_counter() - started) / steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    tokens = ranks.size * shape.tokens
    return {"step_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds, "peak_gib": peak}


def rank_main(options: argparse.Namespace) -> None:
    """Run both measurements in one process; the first rank writes the results."""
    torch.backends.cuda.matmul.allow_tf32 = False
    ranks, (parallel,) = Ranks.join(options.device), options.parallel
    results = curve(ranks, parallel, CURVES[options.curve_shape], 2 * max(options.counts))
    free_memory()
    results |= speed(ranks, parallel, SHAPES[options.shape], options.steps)
    if ranks.is_main:
        Path(options.out).write_text(json.dumps(results))
    ranks.all_gather(None)
    ranks.leave()


def measure(count: int, parallel: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of `count` new processes, free of another backend's memory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        words = ["--out", str(out), "--parallel", parallel]
        for name in ("device", "shape", "curve_shape", "steps"):
            words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        words += ["--counts", *map(str, options.counts)]
        code = launch(words, count, PrintMonitor(errors=True), program=(sys.executable, __file__))
        if code:
            raise SystemExit(f"{count} processes failed with exit code {code}")
        return json.loads(out.read_text())


def difference(one: list[float], two: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / abs(a) for a, b in zip(one, two, strict=True))


def main() -> int:
    """Run the command line."""
    num_gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parallel", nargs="+", choices=PARALLEL, default=PARALLEL)
    parser.add_argument(
        "--counts", nargs="+", type=int, default=[n for n in (1, 2, 4) if n <= max(1, num_gpus)]
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="of the speed")
    parser.add_argument("--curve-shape", choices=CURVES, default="1b")
    parser.add_argument("--steps", type=int, default=20, help="timed")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.out:
        rank_main(options)
        return 0
    alone = measure(1, "ddp", options)
    speeds = ("step_ms", "tokens_per_s", "peak_gib")
    row = {"parallel": "one process", "processes": 1, **{name: alone[name] for name in speeds}}
    print(json.dumps(row), flush=True)
    failed = False
    for count in (n for n in options.counts if n > 1):
        for parallel in options.parallel:
            results = measure(count, parallel, options)
            row: dict[str, Any] = {"parallel": parallel, "processes": count}
            differences = {
                name: difference(alone[name], results[name]) for name in ("losses", "norms")
            }
            differences["weights"] = max(
                difference([weight], [results["weights"][name]])
                for name, weight in alone["weights"].items()
            )
            row |= {f"{name}_difference": value for name, value in differences.items()}
            row["scaling"] = results["tokens_per_s"] / count / alone["tokens_per_s"]
            row |= {name: results[name] for name in speeds}
            row["same"] = max(differences.values()) <= CURVE_BOUND
            row["scales"] = row["scaling"] >= SCALING_BOUND or options.device == "cpu"
            failed |= not (row["same"] and row["scales"])
            print(json.dumps(row), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
