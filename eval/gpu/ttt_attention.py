"""Attention of training-time test on a GPU: checked against the reference, timed beside others.

    python eval/gpu/ttt_attention.py [--sweep]

Work: Llama-3.1-8B's heads, the last 70 % of every row of the batch. TFLOP/s count the products that
the rows need (4 · head_dim a pair of row and key, backward 2.5 times that). Yardsticks: the eager
reference; PyTorch's causal attention over *all* rows, which has no own keys; flex attention on the
rows of step 0. `--sweep` tries other tiles, one kernel at a time, and prints the best.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels.ttt_attention import (
    OwnKeys,
    document_starts,
    ttt_attention,
    ttt_attention_reference,
)
from draftlab.kernels.ttt_attention_launch import Plan, plan_ttt_attention, ttt_attention_triton


class Case:
    """Rows at the last `share` of the slots of packed documents, with own keys of `steps` steps."""

    def __init__(self, lengths, share, steps, heads, kv_heads, head_dim, dtype) -> None:
        batch, width = len(lengths), max(map(sum, lengths))
        documents = torch.full((batch, width), -1)
        for row, each in zip(documents, lengths, strict=True):
            numbers = torch.arange(len(each)).repeat_interleave(torch.tensor(each))
            row[: len(numbers)] = numbers
        count = round(share * width)
        index = torch.arange(width - count, width).expand(batch, -1).contiguous()
        starts = document_starts(documents).gather(1, index)
        self.pairs = int((index - starts + 1 + steps).where(starts <= index, 0).sum()) * heads
        self.index, self.starts = index.cuda(), starts.cuda()

        def random(rows: int, num_heads: int) -> Tensor:
            shape = batch, rows, num_heads, head_dim
            return torch.randn(shape, device="cuda").to(dtype).requires_grad_()

        self.query = random(count, heads)
        self.key, self.value = random(width, kv_heads), random(width, kv_heads)
        self.own = None
        for left in range(steps - 1, -1, -1):  # a row of each batch row ends at each step
            made = random(count + left, kv_heads), random(count + left, kv_heads)
            select = torch.arange(1, count + left + 1, device="cuda").expand(batch, -1)
            self.own = OwnKeys.extended(self.own, *made, select)
        self.d_output = torch.randn_like(self.query)
        self.flops = 4 * head_dim * self.pairs

    def leaves(self) -> list[Tensor]:
        own = [] if self.own is None else [*self.own.keys, *self.own.values]
        return [self.query, self.key, self.value, *own]

    def __call__(self, attend: Callable[..., Tensor] = ttt_attention) -> Tensor:
        return attend(self.query, self.key, self.value, self.index, self.starts, self.own)

    def gradients(self, attend: Callable[..., Tensor] = ttt_attention) -> list[Tensor]:
        output = self(attend)
        return [output, *torch.autograd.grad(output, self.leaves(), self.d_output)]

    def exact(self) -> list[Tensor]:
        """The reference's output and gradients, in float64."""
        query, key, value, *own = (t.detach().double().requires_grad_() for t in self.leaves())
        steps = len(own) // 2
        made = OwnKeys(tuple(own[:steps]), tuple(own[steps:]), self.own.rows) if own else None
        output = ttt_attention_reference(query, key, value, self.index, self.starts, made)
        leaves = [query, key, value, *own]
        return [output, *torch.autograd.grad(output, leaves, self.d_output.double())]


CHECKED = [  # documents of each row, share, steps, heads, kv heads, head_dim
    ([[700, 1, 300], [90, 33], [1001]], 0.7, 0, 32, 8, 128),
    ([[700, 1, 300], [90, 33], [1001]], 0.7, 6, 32, 8, 128),
    ([[511], [2, 3, 500]], 1.0, 3, 14, 2, 80),
    ([[257, 260]], 0.5, 1, 8, 8, 64),
    ([[130], [77, 40]], 0.9, 9, 8, 1, 256),
    ([[37]], 0.3, 2, 6, 6, 32),
]


def check_all() -> None:
    """Relative errors of output and gradients; raises where they are more than rounding."""
    bounds = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 5e-6}
    for dtype, bound in bounds.items():
        worst = 0.0
        for shape in CHECKED[1:3] if dtype == torch.float16 else CHECKED:
            torch.manual_seed(0)
            case = Case(*shape, dtype)
            found = case.gradients()
            for a, b in zip(found, case.gradients(), strict=True):
                assert torch.equal(a, b), f"two runs differ: {shape}"
            for number, (mine, exact) in enumerate(zip(found, case.exact(), strict=True)):
                error = ((mine - exact).norm() / exact.norm().clamp(min=1e-9)).item()
                assert error < bound, (shape, dtype, number, error)
                worst = max(worst, error)
            assert not found[0][case.starts > case.index].any(), "padding is not zero"
        print(f"equal to the reference, {str(dtype)[6:]}: worst relative error {worst:.1e}")


def milliseconds(call: Callable[[], object], repeats: int = 12) -> float:
    """Median of calls timed one by one, L2 emptied before each."""
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return median(times[2:])


def forward_and_both(case: Case, attend: Callable[..., Tensor], repeats: int = 12) -> str:
    """ms and TFLOP/s, forward and forward + backward."""
    with torch.no_grad():
        forward = milliseconds(lambda: case(attend), repeats)
    both = milliseconds(lambda: case.gradients(attend), repeats)
    rates = case.flops / forward / 1e9, 3.5 * case.flops / both / 1e9
    return f"{forward:7.3f} {both:7.3f} ms, {rates[0]:4.0f} {rates[1]:4.0f} TFLOP/s"


def sdpa(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """PyTorch's causal attention; as many rows as keys."""
    query, key, value = (t.transpose(1, 2) for t in (query, key, value))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


def flex(case: Case) -> Callable[..., Tensor]:
    """Compiled flex attention with a block mask of the case's rows, made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    index, starts = case.index, case.starts

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (starts[b, row] <= key) & (key <= index[b, row])

    sizes = index.shape[0], None, index.shape[1], case.key.shape[1]
    mask = create_block_mask(seen, *sizes, device="cuda")
    run = torch.compile(flex_attention)

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        return run(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def sweep(case: Case) -> None:
    """The best tiles of each kernel, the others as planned."""
    planned = plan_ttt_attention(case.query, case.query.shape[2] // case.key.shape[2])
    for kernel in Plan._fields:
        found = []
        chosen = getattr(planned, kernel)
        for rows, keys, warps, stages in product((32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)):
            tiles = chosen._replace(rows=rows, keys=keys, warps=warps, stages=stages)
            if rows * keys < 2048 or (rows * keys > 8192 and warps == 4):
                continue
            attend = partial(ttt_attention_triton, plan=planned._replace(**{kernel: tiles}))
            call = case if kernel == "forward" else case.gradients
            try:
                with torch.set_grad_enabled(kernel != "forward"):
                    found.append((milliseconds(lambda a=attend, c=call: c(a), 7), tiles))
            except Exception as error:
                if "out of resource" not in str(error):
                    raise
        listed = ", ".join(f"{time:.3f} {tuple(tiles)}" for time, tiles in sorted(found)[:3])
        was = next((time for time, tiles in found if tiles == chosen), float("nan"))
        print(f"{kernel}: planned {was:.3f} {tuple(chosen)}; best {listed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles (minutes)")
    arguments = parser.parse_args()
    check_all()
    heads = 32, 8, 128, torch.bfloat16
    if arguments.sweep:
        sweep(Case([[2048]] * 4, 0.7, 3, *heads))
        return
    print("forward, forward + backward of the same; keys of step 0 and own keys k")
    for lengths in ([[2048]] * 4, [[700, 300, 1048]] * 4, [[8192]]):
        name = f"{len(lengths)} x {'+'.join(map(str, lengths[0]))}"
        for steps in (0, 3, 6) if len(lengths[0]) == 1 else (3,):
            case = Case(lengths, 0.7, steps, *heads)
            print(f"{name} k {steps}: kernel {forward_and_both(case, ttt_attention)}", flush=True)
            if steps in (0, 6) and len(lengths) > 1:
                eager = forward_and_both(case, ttt_attention_reference, 5)
                print(f"{name} k {steps}: eager  {eager}", flush=True)
        whole = Case(lengths, 1.0, 0, *heads)
        if len(lengths[0]) == 1:
            print(f"{name} all rows: kernel {forward_and_both(whole, ttt_attention)}", flush=True)
            print(f"{name} all rows: sdpa   {forward_and_both(whole, sdpa)}", flush=True)
    case = Case([[2048]] * 4, 0.7, 0, *heads)
    attend = flex(case)
    case.gradients(attend)
    print(f"4 x 2048 k 0: flex   {forward_and_both(case, attend)}", flush=True)


if __name__ == "__main__":
    main()
