"""Paged attention on a GPU: checked against the reference, timed against the memory's speed.

    python eval/gpu/attention.py [--sweep]

Times are those of one call among many in a CUDA graph, each with pools of its own that together
exceed L2 several times. `--sweep` tries other plans and prints the best beside the chosen one.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels import dependent_launch
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.paged_attention_launch import Plan, plan_attention

BANDWIDTH = 4.15e12  # an H200's measured streaming rate


class Case:
    """A cache with rows of the given lengths, everything unwritten NaN, and M new tokens a row."""

    def __init__(self, lengths, m, heads, kv_heads, head_dim, block_size, dtype, spare=2) -> None:
        total = [n + m for n in lengths]
        width = -(-max(total) // block_size) + spare
        options = {"device": "cuda", "dtype": dtype}
        blocks = len(lengths) * width
        shape = blocks, block_size, kv_heads, head_dim
        self.key_pool = torch.full(shape, float("nan"), **options)
        self.value_pool = torch.full(shape, float("nan"), **options)
        self.table = torch.randperm(blocks, device="cuda").view(-1, width).int()
        depth = torch.arange(m, device="cuda")
        starts = torch.tensor(lengths, device="cuda")[:, None]
        self.positions = starts + depth
        everything = torch.arange(max(total), device="cuda").expand(len(lengths), -1)
        blocks = self.table.gather(1, everything // block_size).long()
        slots = blocks * block_size + everything % block_size
        slots = slots.where(everything < starts + m, -1)
        # Heads before tokens in memory, as transformers hands them over.
        new = [
            torch.randn(len(lengths), kv_heads, max(total), head_dim, **options).transpose(1, 2)
            for _ in range(2)
        ]
        write_paged(*new, self.key_pool, self.value_pool, slots)
        index = slots.clamp(min=0)
        for pool, source in zip((self.key_pool, self.value_pool), new, strict=True):
            written = pool.view(-1, kv_heads, head_dim)[index][slots >= 0]
            assert torch.equal(written, source[slots >= 0]), "write_paged"
            assert pool.isnan().sum() == pool.numel() - written.numel(), "write_paged: stray writes"
        query = torch.randn(len(lengths), heads, m, head_dim, **options)
        self.query = query.transpose(1, 2)
        self.scale = head_dim**-0.5
        self.read = sum(total) * kv_heads * head_dim * 2 * self.key_pool.element_size()

    def __call__(self, attend=attend_paged, cast=lambda x: x, **options) -> Tensor:
        pools = cast(self.key_pool), cast(self.value_pool)
        options.setdefault("scale", self.scale)
        return attend(cast(self.query), *pools, self.table, self.positions, **options)


CHECKED = [  # lengths, M, heads, kv heads, head_dim, block, options
    ((700, 0, 33), 5, 32, 8, 128, 16, {}),
    ((700, 0, 33), 9, 32, 8, 128, 64, {}),
    ((2000,), 1, 32, 8, 128, 64, {}),
    ((130, 257), 7, 14, 2, 80, 16, {"window": 40}),
    ((130, 257), 3, 6, 6, 96, 16, {"chunk": 64}),
    ((512, 90), 4, 16, 4, 64, 32, {"window": 128, "sinks": True}),
    ((512, 90), 4, 8, 4, 256, 16, {"softcap": 30.0, "window": 300}),
    ((37, 300, 0), 150, 12, 4, 128, 16, {}),
    ((0, 900), 333, 4, 4, 112, 24, {"sinks": True, "window": 70}),
    ((100,) * 40, 9, 16, 8, 32, 16, {}),
]


def check(shape: tuple, options: dict, dtype: torch.dtype, seed: int) -> float:
    """Relative error of the kernel on fresh inputs; raises where it is more than rounding."""
    torch.manual_seed(seed)
    case = Case(*shape, dtype)
    if len(case.positions) > 1:  # one row ends early
        case.positions[1, (shape[1] + 1) // 2 :] = -1
    if len(case.positions) > 2:  # one is padding
        case.positions[2, :] = -1
    if "sinks" in options:
        options = options | {"sinks": torch.randn(shape[2], device="cuda").to(dtype)}
    found = case(**options)
    expected = case(attend_paged.reference, Tensor.double, **options)
    assert torch.equal(found, case(**options)), "two runs differ"
    assert not found[case.positions < 0].any(), "padding is not zero"
    error = ((found - expected).norm() / expected.norm()).item()
    bound = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}[dtype]
    assert error < bound, (shape, options, dtype, error)
    return error


def check_all() -> None:
    """Checks in processes of their own, since compiling takes longer than all the rest."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    with ProcessPoolExecutor(15, mp_context=get_context("spawn")) as pool:
        checks = {
            dtype: [
                pool.submit(check, tuple(shape), options, dtype, torch.seed() % 2**31)
                for *shape, options in (CHECKED[:3] if dtype == torch.float16 else CHECKED)
            ]
            for dtype in dtypes
        }
        worst = {d: max(c.result() for c in found) for d, found in checks.items()}
    listed = ", ".join(f"{str(d)[6:]} {e:.1e}" for d, e in worst.items())
    print(f"equal to the reference; worst relative errors: {listed}", flush=True)


def graph_time(calls: list, repeats: int = 15) -> float:
    """Median seconds of one of `calls`, all in one CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3 / len(calls))
    return median(times[3:])


def copies(lengths: tuple[int, ...], m: int, block: int) -> list[Case]:
    """Cases of Llama 3.1 8B's shapes that together exceed L2 (50 MB) several times."""
    size = (sum(lengths) + m * len(lengths)) * 8 * 128 * 4
    count = max(3, min(32, -(-300_000_000 // size)))
    return [Case(lengths, m, 32, 8, 128, block, torch.bfloat16, spare=0) for _ in range(count)]


def widen(case: Case, capacity: int) -> None:
    """Gives a case the table of an engine whose rows may grow to `capacity` positions."""
    width = capacity // case.key_pool.shape[1]
    missing = width - case.table.shape[1]
    if missing > 0:
        case.table = torch.nn.functional.pad(case.table, (0, missing))


def times(cases: list[Case], plan: Plan | None = None) -> float:
    return graph_time([lambda c=c: c(attend_paged.triton, plan=plan) for c in cases])


def sweep(cases: list[Case], chosen: Plan) -> tuple[float, Plan]:
    found = []
    for keys, stages, splits in itertools.product(
        (32, 64, 128),
        (3, 5),
        sorted({max(1, chosen.splits // 2), chosen.splits, 2 * chosen.splits}),
    ):
        plan = Plan(chosen.rows, keys, splits, chosen.warps, stages)
        try:
            found.append((times(cases, plan), plan))
        except Exception as error:
            if "out of resource" not in str(error):
                raise
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other plans")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    check_all()
    mixed = tuple(1000 + 80 * i for i in range(64))
    decode = [
        *(((context,), m) for context in (512, 2048) for m in (1, 4, 6, 9)),
        ((16384,), 6),
        ((1000,) * 8, 6),
        ((2048,) * 32, 6),
        (mixed, 1),
        (mixed, 9),
    ]
    print("rows x M, context: us/call (plain launch; write + attend), floor us, share, plan")
    for (lengths, m), block in itertools.product(decode, (16, 64)):
        if block == 16 and (lengths, m) not in (((2048,), 6), (mixed, 9)):
            continue
        cases = copies(lengths, m, block)
        for case in cases:
            widen(case, max(8192, max(lengths) + 64))
        case = cases[0]
        plan = plan_attention(case.query, case.key_pool, case.table, None, None)
        ours = times(cases)
        dependent_launch.ENABLED = False
        plain = times(cases)
        dependent_launch.ENABLED = True
        new = torch.randn(len(lengths), m, 8, 128, device="cuda", dtype=torch.bfloat16)
        slots = torch.arange(len(lengths) * m, device="cuda").view(-1, m)
        both = graph_time(
            [
                lambda c=c, new=new, slots=slots: (
                    write_paged(new, new, c.key_pool, c.value_pool, slots),
                    c(),
                )
                for c in cases
            ]
        )
        floor = case.read / BANDWIDTH
        print(
            f"{len(lengths):2d} x {m}, {sum(lengths) // len(lengths):5d}, S {block}: "
            f"{ours * 1e6:6.2f} ({plain * 1e6:6.2f}; {both * 1e6:6.2f}) {floor * 1e6:6.2f} "
            f"{floor / ours:4.0%} {tuple(plan)}",
            flush=True,
        )
        if arguments.sweep and block == 64 and m in (4, 9) and lengths != (512,):
            best, plan = sweep(cases, plan)
            print(f"    best {best * 1e6:6.2f} {floor / best:4.0%} {tuple(plan)}", flush=True)
        del cases, case
    for lengths, m in (((0,), 2048), ((6144,), 2048), ((0,) * 8, 256)):
        cases = [Case(lengths, m, 32, 8, 128, 64, torch.bfloat16, spare=0) for _ in range(2)]
        wall = times(cases)
        flops = sum(4 * 32 * 128 * (m * n + m * (m + 1) / 2) for n in lengths)
        print(
            f"prefill {len(lengths)} x {m} after {lengths[0]}: {wall * 1e6:7.1f} us, "
            f"{flops / wall / 1e12:4.0f} TFLOP/s"
        )


if __name__ == "__main__":
    main()
