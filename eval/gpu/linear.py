"""Skinny products on a GPU: checked against the reference, timed against the memory's speed.

    python eval/lab/tune_linear.py [--json FILE] [--table]

Prints per shape and number of rows: our time with and without programmatic dependent launch, the
time of F.linear, the share of 4.15 TB/s (an H200's measured streaming rate) of ours and of
F.linear, and the best of the configurations tried. `--table` tries none and times what `choose`
says. Weights rotate through copies larger than L2, in a CUDA graph of many launches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels import dependent_launch
from draftlab.kernels.linear import (
    linear,
    linear_reference,
    swiglu_linear,
    swiglu_linear_reference,
)
from draftlab.kernels.linear_launch import Config, choose, launch

BANDWIDTH = 4.15e12
# name: rows of W (of gate and of up), Kin, kind
SHAPES = {
    "qkv": (6144, 4096, "norm"),
    "o": (4096, 4096, "residual"),
    "gate_up": (14336, 4096, "gated"),
    "down": (4096, 14336, "residual"),
    "lm_head": (128256, 4096, "norm"),
    "draft_lm_head": (32000, 4096, "norm"),
    "draft_qkv": (6144, 8192, "plain"),
    "draft_fc": (4096, 12288, "plain"),
}
# M the configurations are compared at, and the M that the best one is timed at.
CLASSES = {4: (1, 4, 6), 9: (9, 16), 32: (32,), 64: (64,)}
_NARROW = [
    Config(16, 256, 1, 1, 4),
    Config(16, 256, 1, 1, 6),
    Config(16, 128, 1, 1, 8),
    Config(16, 512, 1, 1, 4),
    Config(16, 256, 2, 1, 5),
    Config(32, 128, 1, 2, 6),
    Config(32, 256, 1, 2, 4),
    Config(32, 256, 2, 2, 4),
]
_WIDE = [
    Config(64, 64, 1, 4, 6),
    Config(64, 128, 1, 4, 4),
    Config(64, 64, 4, 4, 6),
    Config(64, 128, 2, 4, 4),
    Config(64, 128, 4, 4, 4),
    Config(128, 64, 1, 4, 5),
    Config(128, 64, 1, 8, 5),
    Config(128, 128, 4, 8, 4),
]


def _chosen(num_rows: int, num_out: int, size_in: int, kind: str) -> Config:
    return choose(num_rows, num_out, size_in, kind == "gated", kind in ("gated", "norm"))


def candidates(num_rows: int, num_out: int, size_in: int, kind: str) -> list[Config]:
    """Configurations worth a try: they fit, and give most multiprocessors something to do."""
    rows = max(8, 1 << (num_rows - 1).bit_length())
    weights = 2 if kind == "gated" else 1
    some = [*(_NARROW if rows <= 16 else []), *_WIDE]
    some += [replace(c, prefetch=1024) for c in some]
    fitting = []
    for c in {*some, _chosen(num_rows, num_out, size_in, kind)}:
        shared = 2 * c.depth * (weights * c.tile + rows + 1) * (c.stages - 1)
        programs = -(-num_out // c.tile) * c.split
        if shared > 220_000 or programs < 100 or (c.split > 1 and programs > 1600):
            continue
        if kind == "gated" and c.split > 1:
            continue
        fitting.append(c)
    return sorted(fitting, key=astuple)


def arguments(kind: str, num_rows: int, num_out: int, size_in: int, copies: int = 1) -> dict:
    """Random operands of a product; several copies of its weights."""
    generator = torch.Generator("cuda").manual_seed(num_rows)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        return values * scale

    weights = [
        [random(num_out, size_in, scale=0.02) for _ in range(2 if kind == "gated" else 1)]
        for _ in range(copies)
    ]
    return {
        "x": random(num_rows, size_in),
        "weights": weights,
        "norm": 1 + random(size_in, scale=0.1) if kind in ("norm", "gated") else None,
        "residual": random(num_rows, num_out) if kind == "residual" else None,
    }


def call(a: dict, copy: int, config: Config | None) -> torch.Tensor:
    first, *second = a["weights"][copy]
    up = second[0] if second else None
    return launch(a["x"], first, up, a["norm"], 1e-5, None, a["residual"], config)


def compile_one(job: tuple[str, int, Config]) -> str | None:
    """Compiles a variant into Triton's cache on disk; run in many processes at once."""
    kind, num_rows, config = job
    try:
        call(arguments(kind, num_rows, 4 * config.tile, 16384), 0, config)
        torch.cuda.synchronize()
    except Exception as error:  # whatever a compiler may say: printed, and the variant left out
        return f"{job}: {type(error).__name__}: {error}"
    return None


def microseconds(work, count: int, replays: int = 7) -> float:
    """Median time of one of `count` calls captured in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work(0)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            work(i)
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return median(times[1:])


def check() -> None:
    """Against the reference in float32 on odd and even shapes; splits repeat bit for bit."""
    torch.backends.cuda.matmul.allow_tf32 = False
    narrow, split = Config(16, 256, 1, 1, 4, 256), Config(64, 64, 4, 4, 4, 256)
    cases = (
        (torch.bfloat16, (1, 40, 96), (None,)),
        (torch.bfloat16, (3, 1000, 520), (None, narrow)),
        (torch.bfloat16, (5, 4096, 4096), (None, split)),
        (torch.bfloat16, (9, 257, 4104), (None, split)),
        (torch.bfloat16, (64, 640, 896), (None, split)),
        (torch.float16, (6, 1000, 4096), (None, split)),
    )
    worst = 0.0
    for dtype, shape, configs in cases:
        for config in configs:
            worst = max(worst, check_case(dtype, *shape, config))
    print(f"check: worst error {worst:.4f} of the largest value (bf16 rounds at 0.004)")
    check_chain()


def check_case(dtype: torch.dtype, m: int, n: int, k: int, config: Config | None) -> float:
    """The largest error of one shape, with everything folded in and with little."""
    generator = torch.Generator("cuda").manual_seed(m)

    def draw(*shape: int, scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        values = torch.randn(*shape, generator=generator, device="cuda")
        return (mean + scale * values).to(dtype)

    x, w, u = draw(m, k, scale=4), draw(n, k, scale=k**-0.5), draw(n, k, scale=k**-0.5)
    norm, residual = draw(k, scale=0.2, mean=1), draw(m, n)
    errors = []
    for parts in (
        {"norm_weight": norm, "eps": 1e-5, "bias": draw(n), "residual": residual},
        {"residual": residual},
    ):
        wide = {name: p.float() if torch.is_tensor(p) else p for name, p in parts.items()}
        expected = linear_reference(x.float(), w.float(), **wide)
        found = [linear(x, w, config=config, **parts) for _ in range(5)]
        assert all(torch.equal(found[0], other) for other in found), (m, n, k, config)
        errors.append(difference(found[0], expected))
    expected = swiglu_linear_reference(
        x.float(), w.float(), u.float(), norm_weight=norm.float(), eps=1e-5
    )
    found = swiglu_linear(x, w, u, norm_weight=norm, eps=1e-5, config=config)
    errors.append(difference(found, expected))
    assert max(errors) < 0.02, (dtype, m, n, k, config, errors)
    return max(errors)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def check_chain() -> None:
    """Products that feed each other, overlapped in a graph, equal the same ones one by one."""
    generator = torch.Generator("cuda").manual_seed(0)
    w = [
        (torch.randn(2048, 2048, generator=generator, device="cuda") * 0.03).bfloat16()
        for _ in range(8)
    ]
    x = torch.randn(4, 2048, generator=generator, device="cuda").bfloat16()
    norm = torch.ones_like(x[0])

    def chain(_: int = 0) -> torch.Tensor:
        y = x
        for i in range(64):
            split = Config(64, 64, 1 + i % 3, 4, 4, 256)
            y = linear(y, w[i % 8], norm_weight=norm, eps=1e-5, residual=y, config=split)
        return y

    dependent_launch.ENABLED = False
    expected = chain()
    torch.cuda.synchronize()
    dependent_launch.ENABLED = True
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain()
    for _ in range(20):
        found.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected), "overlapped launches changed a result"
    print("check: 64 dependent products overlapped in a graph equal one by one, 20 times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where every single timing goes")
    parser.add_argument("--table", action="store_true", help="time `choose` only")
    parser.add_argument("--processes", type=int, default=12)
    options = parser.parse_args()
    began = time.time()
    overlap = dependent_launch.supported(torch.device("cuda:0"))
    print(torch.cuda.get_device_name(), torch.__version__, f"overlap {overlap}")
    check()
    plans = {
        (name, m): [_chosen(m, n, k, kind)] if options.table else candidates(m, n, k, kind)
        for name, (n, k, kind) in SHAPES.items()
        for m in CLASSES
    }
    jobs = {(SHAPES[name][2], m, c) for (name, m), some in plans.items() for c in some}
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        failed = [
            line for line in pool.map(compile_one, sorted(jobs, key=str), chunksize=4) if line
        ]
    print(f"{len(jobs)} variants compiled after {time.time() - began:.0f} s")
    for line in failed:
        print("  left out:", line[:200])
    print("shape             M | us, us without overlap, F.linear us | share ours, F.linear | best")
    rows = []
    for (name, m), some in plans.items():
        n, k, kind = SHAPES[name]
        size = 2 * n * k * (2 if kind == "gated" else 1)
        copies = max(2, -(-400_000_000 // size))
        count = copies * max(1, round(2.5e9 / size / copies)) if size < 1e9 else 4
        a = arguments(kind, m, n, k, copies)
        timed = {}
        for config in some:
            if any(line.startswith(str((kind, m, config))) for line in failed):
                continue
            timed[config] = microseconds(lambda i: call(a, i % copies, config), count)  # noqa: B023
        best = min(timed, key=timed.get)
        rows += [{"shape": name, "m": m, "config": astuple(c), "us": t} for c, t in timed.items()]
        for num_rows in CLASSES[m]:
            b = arguments(kind, num_rows, 8, k) | {"weights": a["weights"]}
            b["residual"] = None if b["residual"] is None else a["x"].new_zeros(num_rows, n)
            ours = microseconds(lambda i: call(b, i % copies, best), count)  # noqa: B023
            dependent_launch.ENABLED = False
            apart = microseconds(lambda i: call(b, i % copies, best), count)  # noqa: B023
            dependent_launch.ENABLED = True
            plain = microseconds(
                lambda i: [F.linear(b["x"], w) for w in a["weights"][i % copies]],  # noqa: B023
                count,
            )
            share = [size / (t * 1e-6) / BANDWIDTH for t in (ours, plain)]
            print(
                f"{name:14} {num_rows:4} | {ours:7.2f} {apart:7.2f} {plain:7.2f} | "
                f"{share[0]:4.0%} {share[1]:4.0%} | {'/'.join(map(str, astuple(best)))}"
            )
            rows.append(
                {"shape": name, "m": num_rows, "best": astuple(best)}
                | {"us": ours, "apart": apart, "linear": plain}
            )
    if options.json:
        options.json.write_text(json.dumps(rows))
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
