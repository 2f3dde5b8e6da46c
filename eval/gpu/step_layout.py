"""The small kernels around a decode step on a GPU: checked against their references, then timed.

    python eval/gpu/step_layout.py

Each replaces a dozen operations on a few kilobytes, so what counts is the time of a launch among
others in a CUDA graph, beside that of the reference's operations in the same graph. Exits with 1
where anything differs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels import chain_layout as chains
from draftlab.kernels import head_inputs as inputs
from draftlab.kernels import step_layout as steps
from draftlab.kernels.sampling import argmax_draft, sample_draft
from draftlab.kernels.sampling_types import SamplingMetadata, VerifyResult
from draftlab.kernels.step_types import SlotBuffers

BLOCK, WIDTH, VOCAB, DRAFTS = 64, 128, 128_256, 32_000
LIMIT = BLOCK * (WIDTH - 1)  # tables are a block longer than the limit
LAY_OUT = {"max_length": LIMIT, "block_size": BLOCK}


def make_slots(entries: int, k: int, dtype: torch.dtype) -> SlotBuffers:
    """Random buffers: empty slots, rows near the limit, blocks that nobody owns; a dummy last."""

    def ints(*shape: int, high: int = VOCAB) -> Tensor:
        return torch.randint(0, high, (entries, *shape), device="cuda")

    length = torch.randint(1, LIMIT + 1, (entries,), device="cuda")
    length[::3] = LIMIT - torch.arange(len(length[::3]), device="cuda") % (k + 2)
    length[4::5] = 0
    length[-1] = 0
    table = torch.randint(0, 9999, (entries, WIDTH), device="cuda", dtype=torch.int32)
    table[torch.rand(entries, WIDTH, device="cuda") < 0.1] = 0
    temperature = torch.rand(entries, device="cuda")
    keys = SamplingMetadata(temperature, ints(), temperature + 1, ints(), -ints() << 30)
    return SlotBuffers(
        length,
        ints(),
        ints(k),
        table,
        keys,
        (torch.rand(entries, device="cuda"), ints(high=2).bool()),
        torch.zeros(entries, k, DRAFTS, device="cuda", dtype=dtype),
        torch.zeros(entries, k, device="cuda"),
    )


def make_index(rows: int, dummy: int) -> Tensor:
    """Different slots, and the dummy twice where there is room."""
    index = torch.randperm(dummy)[:rows]
    index[rows - rows // 3 :] = dummy
    return index.cuda()


def make_verdict(layout: steps.StepLayout) -> VerifyResult:
    rows, width = layout.tokens.shape
    accepted = (torch.rand(rows, device="cuda") * (layout.num_drafts + 1)).long()
    emitted = torch.randint(0, VOCAB, (rows,), device="cuda")
    return VerifyResult(accepted, emitted, torch.rand(rows, width - 1, device="cuda"))


def make_proposal(rows: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts, logits and their sums, one pass behind the other in memory."""
    drafts = torch.randint(0, VOCAB, (k, rows), device="cuda").T
    logits = torch.randn(k, rows, DRAFTS, device="cuda").to(dtype).transpose(0, 1)
    return drafts, logits, torch.randn(k, rows, device="cuda").T


def same(one: Any, other: Any, rows: slice = slice(None)) -> None:
    """Equality of every tensor in two objects, nested ones too, and of their dtypes."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one[rows], other[rows])
    elif one is not None:
        parts = (x if isinstance(x, tuple) else vars(x).values() for x in (one, other))
        for a, b in zip(*parts, strict=True):
            if not isinstance(a, int):
                same(a, b, rows)


def check_step(rows: int, k: int, dtype: torch.dtype) -> None:
    """A step's three kernels; the dummy's rows race for one place, so its entries are left out."""
    slots = make_slots(2 * rows + 2, k, dtype)
    index = make_index(rows, len(slots.length) - 1)
    layout = steps.gather_batch(slots, index, **LAY_OUT)
    same(layout, steps.gather_batch.reference(slots, index, **LAY_OUT))
    verdict, proposal = make_verdict(layout), make_proposal(rows, k, dtype)
    ours, eager = deepcopy(slots), deepcopy(slots)
    found = steps.commit(ours, layout, verdict)
    same(found, steps.commit.reference(eager, layout, verdict))
    steps.store_drafts(ours, index, *proposal)
    steps.store_drafts.reference(eager, index, *proposal)
    same(ours, eager, slice(-1))
    assert not torch.equal(ours.length, slots.length)
    chain = found.positions, found.counts, layout.block_table, BLOCK, k - 1
    same(chains.chain_layout(*chain), chains.chain_layout.reference(*chain))


def head_arguments(rows: int, width: int, dtype: torch.dtype, size: int = 4096) -> tuple:
    tokens = torch.randint(0, 999, (width, rows), device="cuda").T
    hidden = torch.randn(rows, width, size, device="cuda").to(dtype)
    embeddings = torch.randn(999, size, device="cuda").to(dtype)
    norms = (1 + 0.1 * torch.randn(2, size, device="cuda")).to(dtype)
    return tokens, hidden, embeddings, *norms, 1e-5


def check_head(rows: int, width: int, dtype: torch.dtype) -> float:
    """Worst share of entries of a head's inputs that differ, by one rounding at most."""
    worst = 0.0
    counts = torch.randint(1, width + 1, (rows,), device="cuda") if width > 1 else None
    for size in (4096, 200):
        arguments = head_arguments(rows, width, dtype, size)
        if counts is not None:
            hidden = arguments[1]
            same(chains.last_rows(hidden, counts), chains.last_rows.reference(hidden, counts))
        for before in (False, True):
            options = {"norm_before_residual": before, "counts": counts}
            found = inputs.head_inputs(*arguments, **options)
            expected = inputs.head_inputs.reference(*arguments, **options)
            for one, other in zip(found, expected, strict=True):
                step = 2.0**-7 if dtype == torch.bfloat16 else 4e-6
                torch.testing.assert_close(one, other, rtol=step, atol=1e-6)
                worst = max(worst, float((one != other).float().mean()))
    return worst


def check_drafts(rows: int, dtype: torch.dtype) -> float:
    """Share of drafts that are those of the reference on a CPU (rounding may flip a race)."""
    logits = 3 * torch.randn(rows, DRAFTS, device="cuda").to(dtype)
    ids = torch.randperm(VOCAB, device="cuda")[:DRAFTS].sort().values
    assert torch.equal(argmax_draft(logits, ids=ids), ids[logits.argmax(-1)])
    positions = torch.randint(0, LIMIT, (rows,), device="cuda")
    slots = make_slots(rows, 1, dtype)
    temperature = torch.rand(rows, device="cuda") + 0.1
    sampled = torch.rand(rows, device="cuda") < 0.8
    out = torch.zeros(3, rows, dtype=torch.int64, device="cuda"), torch.zeros(3, rows).cuda()
    given = logits, positions, slots.keys, temperature, sampled
    sample_draft(*given, ids=ids, offset=5, out=(out[0][1], out[1][1]))
    assert not out[0][::2].any()
    on_cpu = [x.cpu() for x in (logits, positions, temperature, sampled, ids)]
    keys = SamplingMetadata(*(x.cpu() for x in vars(slots.keys).values()))
    expected = sample_draft(on_cpu[0], on_cpu[1], keys, *on_cpu[2:4], ids=on_cpu[4], offset=5)
    torch.testing.assert_close(out[1][1].cpu(), expected[1], rtol=1e-5, atol=1e-4)
    return float((out[0][1].cpu() == expected[0]).float().mean())


def check_replays() -> None:
    """A captured step sees what its buffers hold when it is replayed, at the right addresses."""
    slots, index = make_slots(20, 4, torch.bfloat16), make_index(8, 19)
    accepted = torch.zeros(8, dtype=torch.int64, device="cuda")
    verdict = VerifyResult(accepted, accepted + 7, torch.rand(8, 4, device="cuda"))
    proposal = make_proposal(8, 4, torch.bfloat16)

    def work() -> tuple:
        layout = steps.gather_batch(slots, index, **LAY_OUT)
        outcome = steps.commit(slots, layout, verdict)
        steps.store_drafts(slots, index, *proposal)
        return layout, outcome

    graph, found = capture(work)
    for _ in range(5):
        index.copy_(make_index(8, 19))
        eager = deepcopy(slots)
        graph.replay()
        layout = steps.gather_batch.reference(eager, index, **LAY_OUT)
        same(found, (layout, steps.commit.reference(eager, layout, verdict)))
        steps.store_drafts.reference(eager, index, *proposal)
        same(slots, eager, slice(-1))


def capture(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = work()
    return graph, found


def microseconds(work: Callable[[], Any], count: int = 40) -> float:
    """Time of one call among many in a CUDA graph."""
    graph, _ = capture(lambda: [work() for _ in range(count)])
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return median(times[1:])


def times(rows: int, k: int) -> None:
    dtype = torch.bfloat16
    slots = make_slots(rows + 1, k, dtype)
    index = torch.arange(rows, device="cuda")
    layout = steps.gather_batch(slots, index, **LAY_OUT)
    verdict, proposal = make_verdict(layout), make_proposal(rows, k, dtype)
    outcome = steps.commit(slots, layout, verdict)
    chain = outcome.positions, outcome.counts, layout.block_table, BLOCK, k - 1
    first, later = head_arguments(rows, k + 1, dtype), head_arguments(rows, 1, dtype)
    logits = proposal[1][:, 0]
    ids, flags = torch.arange(DRAFTS, device="cuda") * 4, torch.ones(rows, device="cuda").bool()
    drawn = logits, layout.length, layout.keys, layout.keys.temperature, flags
    plain: dict[str, Any] = {"norm_before_residual": False}
    pairs: dict[str, tuple[Callable, Callable | None]] = {
        "lay_out": (
            lambda: steps.gather_batch(slots, index, **LAY_OUT),
            lambda: steps.gather_batch.reference(slots, index, **LAY_OUT),
        ),
        "advance": (
            lambda: steps.commit(slots, layout, verdict),
            lambda: steps.commit.reference(slots, layout, verdict),
        ),
        "keep": (
            lambda: steps.store_drafts(slots, index, *proposal),
            lambda: steps.store_drafts.reference(slots, index, *proposal),
        ),
        "chain_layout": (
            lambda: chains.chain_layout(*chain),
            lambda: chains.chain_layout.reference(*chain),
        ),
        "last_rows": (
            lambda: chains.last_rows(first[1], outcome.counts),
            lambda: chains.last_rows.reference(first[1], outcome.counts),
        ),
        "head_inputs, observed": (
            lambda: inputs.head_inputs(*first, **plain, counts=outcome.counts),
            lambda: inputs.head_inputs.reference(*first, **plain, counts=outcome.counts),
        ),
        "head_inputs, later": (
            lambda: inputs.head_inputs(*later, **plain),
            lambda: inputs.head_inputs.reference(*later, **plain),
        ),
        "argmax_draft": (
            lambda: argmax_draft(logits, ids=ids),
            lambda: ids[logits.argmax(-1)],
        ),
        "sample_draft": (lambda: sample_draft(*drawn, ids=ids, offset=3), None),
    }
    for name, (ours, eager) in pairs.items():
        slow = f"{microseconds(eager):9.1f}" if eager else f"{'—':>9}"
        print(f"{rows:3d} {k:2d}  {name:22} {microseconds(ours):7.2f} {slow}", flush=True)


def main() -> None:
    torch.manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, k in ((1, 1), (1, 4), (3, 3), (8, 8), (33, 5)):
            check_step(rows, k, dtype)
        head = max(check_head(*shape, dtype) for shape in ((1, 1), (3, 1), (5, 4), (33, 2)))
        drafts = min(check_drafts(rows, dtype) for rows in (1, 7, 64))
        print(f"{dtype}: head inputs rounded otherwise {head:.2%}, equal drafts {drafts:.1%}")
        if dtype == torch.bfloat16:  # both round once, from sums in another order
            assert head < 0.02
        assert drafts > 0.95
    check_replays()
    print("step layouts, chains and five replays of a graph equal the references")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; us among others in a graph")
    print(f"{'B':>3} {'K':>2}  {'kernel':22} {'ours':>7} {'eager':>9}")
    for rows, k in ((1, 4), (32, 4)):
        times(rows, k)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
