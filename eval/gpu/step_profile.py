"""Where one decode step goes: the kernels of a replayed graph, in order.

    python eval/gpu/step_profile.py [--k 3,8] [--batch 1] [--layers 8] [--list]

Shapes of Llama-3.1-8B with fewer layers (a layer is like the next) and an EAGLE3 head, as in
eval/bench/bench_decode.py. Prints, for the target's part, one pass of the head and the rest of the
step:
the time from the first kernel's start to the last one's end, and what each kind of kernel adds to
it. A kernel adds the time from the end of all before it to its own end, so overlapped launches are
counted once and the additions sum up to the whole.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))
from bench_decode import random_head, random_target

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling

HINTS = "CatArray copy index gather scatter where compare add mul educe clamp fill"


class Kernel(NamedTuple):
    """One kernel of a step, in microseconds."""

    name: str
    start: float
    adds: float


def kernels_of(engine: Engine, batch: int, replays: int = 5) -> list[list[Kernel]]:
    """The kernels of `replays` replayed steps of a filled batch."""
    ids = torch.randint(10, 120_000, (batch, 512), generator=torch.Generator().manual_seed(0))
    requests = [
        Request(str(i), tuple(row), 64, Sampling(1.0 if engine.drafter else 0.0))
        for i, row in enumerate(ids.tolist())
    ]
    list(engine.generate(requests))
    assert engine.graphs is not None
    with torch.inference_mode():
        # The slots are empty again: a step of a row is made real by giving it a length.
        engine.input_batch.length[:batch] = 512
        width = engine.input_batch.block_table.shape[1]
        table = 1 + torch.arange(batch * width, dtype=torch.int32, device="cuda")
        engine.input_batch.block_table[:batch] = table.view(batch, width)
        found = []
        for _ in range(replays):
            engine.input_batch.length[:batch] = 512
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                engine.graphs(tuple(range(batch)), limited=False)
                torch.cuda.synchronize()
            found.append(_in_order(profiler))
    return found


def _in_order(profiler: profile) -> list[Kernel]:
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in profiler.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    )
    kernels, done = [], events[0][0]
    for start, end, name in events:
        kernels.append(Kernel(name, start - events[0][0], max(0.0, end - done)))
        done = max(done, end)
    return kernels


def short(name: str) -> str:
    """A kernel's name without templates and arguments."""
    name = name.removeprefix("void ").replace("at::native::", "")
    name = name.replace("(anonymous namespace)::", "")
    kind = name.split("<")[0].split("(")[0]
    inner = name.split("<", 1)[-1]
    for hint in HINTS.split():
        if hint in inner and hint not in kind:
            return f"{kind[:40]}[{hint}]"
    return kind[:60]


def table(title: str, kernels: list[Kernel], most: int = 14) -> None:
    times, counts = defaultdict(float), Counter()
    for kernel in kernels:
        times[short(kernel.name)] += kernel.adds
        counts[short(kernel.name)] += 1
    print(f"{title}: {sum(times.values()):.1f} us, {len(kernels)} kernels")
    for name, spent in sorted(times.items(), key=lambda item: -item[1])[:most]:
        print(f"    {spent:8.1f} us  {counts[name]:3d} x {spent / counts[name]:6.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", default="3,8")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--list", action="store_true", help="every kernel of the step's end")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    target = random_target(device, arguments.layers)
    head = random_head(target, device)
    for k in map(int, arguments.k.split(",")):
        drafter = ChainDrafter(head, k) if k else None
        engine = Engine(target, drafter, batch=arguments.batch, max_length=800, expect=False)
        step = min(kernels_of(engine, arguments.batch), key=lambda s: sum(x.adds for x in s))
        table(f"K = {k}, whole step", step)
        products = [i for i, kernel in enumerate(step) if "skinny" in kernel.name]
        if k:  # the last pass lies between the last two products with the head's vocabulary
            last = step[products[-6] + 1 : products[-1] + 1] if k > 1 else step[products[-6] :]
            table(f"K = {k}, last pass of the head", last)
        if arguments.list:
            first = products[-12] if k > 1 else products[-7]
            for kernel in step[:12] + step[first:]:
                print(f"  {kernel.start:9.1f} {kernel.adds:7.2f}  {short(kernel.name)}")


if __name__ == "__main__":
    main()
