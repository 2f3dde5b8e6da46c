"""Measure how the speed of training scales on several GPUs.

    python eval/lab/multi_gpu.py                      # on 1, 2 and 4 GPUs, as available
    python eval/lab/multi_gpu.py --parallel ddp fsdp2 # without DeepSpeed's
    python eval/lab/multi_gpu.py --device cpu --shape tiny --counts 1 2

The work of `bench_train.py` runs on every GPU, with counts reduced as in training. Steps are timed
between barriers. Scaling is tokens/s over the number of processes times one process's. A line is
printed for each backend and number of processes. The program fails if GPUs scale below 0.95. It
turns NCCL's multicast off (NCCL_NVLS_ENABLE=0), which some hosts lack.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from train_work import GAMMA, SHAPES, new_work

from draftlab.cli.launch import launch
from draftlab.train.distillation_module import DistillationModule
from draftlab.train.distributed.ranks import Ranks
from draftlab.train.distributed.wrap import wrap
from draftlab.train.objectives.ttt import ttt_weights
from draftlab.train.settings import TrainSettings
from eval.measurements import PrintMonitor

PARALLEL = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
SCALING_BOUND, RATE = 0.95, 1e-4


def speed(ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    """Return the speed of steps in which every rank has a batch of the shape."""
    on_gpu = ranks.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    shape, (parallel,) = SHAPES[options.shape], options.parallel
    work = new_work(shape, ranks.device, dtype)
    settings = TrainSettings(ttt_steps=shape.steps, parallel=parallel)
    wrapped = wrap(DistillationModule(work.head, work.target, settings, dtype), settings, ranks)
    if ranks.is_main:
        print(f"{parallel}: {wrapped.describe()}", file=sys.stderr, flush=True)
    batch = work.packed(ranks.device).to(ranks.device)
    started = 0.0
    for number in range(-5, options.steps):
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
    seconds = (time.perf_counter() - started) / options.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    tokens = ranks.size * shape.tokens
    return {"step_ms": 1e3 * seconds, "tokens_per_s": tokens / seconds, "peak_gib": peak}


def rank_main(options: argparse.Namespace) -> None:
    """Measure in one process; the first rank writes the results."""
    ranks = Ranks.join(options.device)
    results = speed(ranks, options)
    if ranks.is_main:
        Path(options.out).write_text(json.dumps(results))
    ranks.all_gather(None)
    ranks.leave()


def measure(count: int, parallel: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of `count` new processes, free of another backend's memory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        words = ["--out", str(out), "--parallel", parallel]
        for name in ("device", "shape", "steps"):
            words += [f"--{name}", str(getattr(options, name))]
        code = launch(words, count, PrintMonitor(errors=True), program=(sys.executable, __file__))
        if code:
            raise SystemExit(f"{count} processes failed with exit code {code}")
        return json.loads(out.read_text())


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
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--steps", type=int, default=20, help="timed")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.out:
        rank_main(options)
        return 0
    alone = measure(1, "ddp", options)
    print(json.dumps({"parallel": "one process", "processes": 1, **alone}), flush=True)
    failed = False
    for count in (n for n in options.counts if n > 1):
        for parallel in options.parallel:
            results = measure(count, parallel, options)
            scaling = results["tokens_per_s"] / count / alone["tokens_per_s"]
            row = {"parallel": parallel, "processes": count, "scaling": scaling, **results}
            print(json.dumps(row), flush=True)
            failed |= scaling < SCALING_BOUND and options.device != "cpu"
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
