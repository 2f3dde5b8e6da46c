"""Where a training step goes: its kernels, and where the GPU waits for the host.

    python eval/gpu/train_profile.py [--family eagle3] [--layers 1] [--top 30] [--least 30]

The work of eval/bench/bench_train.py, some steps profiled one behind the other without a word to
the
device between them. Of the last one are printed: how long kernels ran and how long none did; what
each kind of kernel adds, overlapping ones counted once; each time that the GPU was idle for
`--least` microseconds or longer, and between which kernels; and how often the host called what may
make it wait.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from step_profile import short
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_train import step, trainer
from train_work import SHAPES, in_family, new_work

from draftlab.train.profiler import PhaseTimer

STEPS = 3
LAST_OF_A_STEP = "FusedOptimizer"
WAITS = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMemcpy")


class Span(NamedTuple):
    """A kernel or a call, in microseconds."""

    start: float
    end: float
    name: str


def profiled(options: argparse.Namespace) -> tuple[list[Span], list[Span]]:
    """Kernels and the host's calls of the last step."""
    device = torch.device("cuda")
    shape = replace(in_family(SHAPES["8b"], options.family), layers=options.layers)
    work = new_work(shape, device, torch.bfloat16)
    whole, clock = trainer(work, device, options), PhaseTimer(device)
    batch = work.packed(device).to(device)
    clock.start()
    for _ in range(5):
        step(whole, batch, clock)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step(whole, batch, clock)
        torch.cuda.synchronize()
    kernels, calls = [], []
    for event in profiler.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        span = Span(event.time_range.start, event.time_range.end, event.name)
        if not event.name.startswith("Optimizer."):  # a range over kernels, not one
            (kernels if on_gpu else calls).append(span)
    kernels.sort()
    of_optimizer = [i for i, kernel in enumerate(kernels) if LAST_OF_A_STEP in kernel.name]
    ends = [
        i + 1
        for i, after in pairwise([*of_optimizer, None])
        if after is None or kernels[after].start - kernels[i].end > 10_000
    ]
    last = kernels[ends[-2] : ends[-1]]
    since = kernels[ends[-2] - 1].end
    length = last[-1].end - since
    # The host is ahead; its calls are of a step's length before the end of its last ones.
    stop = max(call.end for call in calls if "LaunchKernel" in call.name)
    return [Span(since, since, "the step before"), *last], [
        call for call in calls if stop - length <= call.start <= stop
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", default="eagle3")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--top", type=int, default=30, help="kinds of kernels listed")
    parser.add_argument("--least", type=float, default=30, help="microseconds of a listed wait")
    options = parser.parse_args()
    for name, value in {"compile": "auto", "recompute": "auto", "precision": "bfloat16"}.items():
        setattr(options, name, value)
    options.freeze_lm_head = False
    kernels, calls = profiled(options)
    adds, counts, waits, done = defaultdict(float), Counter(), [], kernels[0].end
    for before, kernel in pairwise(kernels):
        waits.append((max(0.0, kernel.start - done), done, before.name, kernel.name))
        adds[short(kernel.name)] += max(0.0, kernel.end - max(done, kernel.start))
        counts[short(kernel.name)] += 1
        done = max(done, kernel.end)
    length = done - kernels[0].end
    idle = sum(wait for wait, *_ in waits)
    print(f"step {length / 1e3:.1f} ms: {len(kernels) - 1} kernels, none for {idle / 1e3:.2f} ms")
    for name, spent in sorted(adds.items(), key=lambda item: -item[1])[: options.top]:
        print(
            f"  {spent / 1e3:8.2f} ms  {counts[name]:4d} x {spent / counts[name]:8.1f} us  {name}"
        )
    print(f"idle for {options.least:g} us or longer, at ms of the step:")
    for wait, at, before, after in waits:
        if wait >= options.least:
            place = (at - kernels[0].end) / 1e3
            print(f"  {place:8.2f} {wait:7.0f} us  {short(before)} -> {short(after)}")
    asked = Counter(call.name for call in calls if any(wait in call.name for wait in WAITS))
    print(f"the host's calls that may wait: {dict(asked) or 'none'}")


if __name__ == "__main__":
    main()
