"""The layout of parallel drafting on a GPU: checked against the reference, timed in CUDA graphs.

    python eval/gpu/parallel_layout.py

The layout is a few kilobytes, so a step pays for a launch and not for memory: what counts is the
time against that of the reference's operations in the same graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels.parallel_layout import parallel_layout

BANDWIDTH = 4.15e12  # an H200's measured streaming rate


def rectangle(rows: int, k: int, limit: int, width: int | None = None) -> tuple[tuple, dict]:
    """Random arguments of `parallel_layout`; rows of padding, near the limit, without blocks."""
    width, size = width or k + 1, 16
    blocks = limit // size + 2
    device = "cuda"
    table = torch.randint(1, 9999, (rows, blocks), device=device, dtype=torch.int32)
    table[torch.rand(rows, blocks, device=device) < 0.1] = 0
    arguments = (
        torch.randint(1, 200_000, (rows, width), device=device),
        torch.randint(0, width, (rows,), device=device),
        torch.randint(-2, limit + 3, (rows,), device=device),
        table,
    )
    return arguments, {
        "block_size": size,
        "max_length": limit,
        "mask_token_id": 128_255,
        "k": k,
    }


def check() -> None:
    """Equality of every field; then once more from a captured graph after new inputs."""
    torch.manual_seed(0)
    cases = 0
    for k in (1, 2, 3, 5, 8, 13):
        for rows in (1, 2, 7, 32, 65):
            for limit in (17, 300, 8192):
                arguments, options = rectangle(rows, k, limit)
                same(
                    parallel_layout(*arguments, **options),
                    parallel_layout.reference(*arguments, **options),
                )
                cases += 1
    arguments, options = rectangle(9, 5, 300)
    graph = torch.cuda.CUDAGraph()
    parallel_layout(*arguments, **options)
    with torch.cuda.graph(graph):
        found = parallel_layout(*arguments, **options)
    for _ in range(5):
        fresh, _ = rectangle(9, 5, 300)
        for old, new in zip(arguments, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        same(found, parallel_layout.reference(*arguments, **options))
    print(f"check: {cases} layouts and 5 replays of a graph equal the reference")


def same(found: object, expected: object) -> None:
    for field in fields(expected):  # type: ignore[arg-type]
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype, field.name
        assert torch.equal(one, other), field.name


def microseconds(work: Callable[[], object], count: int = 50, replays: int = 20) -> float:
    """Time of one call among many in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            work()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return median(times[1:])


def main() -> None:
    check()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'layout':26} {'us':>6} {'eager us':>9} {'kB':>7} {'of 4.15 TB/s':>13}")
    for k in (3, 5, 8):
        for rows in (1, 8, 32, 64):
            arguments, options = rectangle(rows, k, 8192)
            row(f"B {rows}, K {k}", parallel_layout, parallel_layout.reference, arguments, options)


def row(name: str, ours: Callable, eager: Callable, arguments: tuple, options: dict) -> None:
    layout = ours(*arguments, **options)
    written = sum(getattr(layout, f.name).nbytes for f in fields(layout))
    read = sum(tensor.nbytes for tensor in arguments[:-1]) + layout.slots.numel() * 4
    time = microseconds(lambda: ours(*arguments, **options))
    slow = microseconds(lambda: eager(*arguments, **options))
    share = (written + read) / BANDWIDTH / (time * 1e-6)
    print(f"{name:26} {time:6.2f} {slow:9.1f} {(written + read) / 1e3:7.1f} {share:13.1%}")


if __name__ == "__main__":
    main()
