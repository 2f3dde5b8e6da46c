"""The distillation loss on a GPU: equal to the eager one, timed and weighed against it.

    python eval/gpu/distill.py [--json FILE]

The eager one is `distill` on the logits of all rows at once, the teachers' made once. Beside them,
where it is installed, Liger-Kernel's fused linear distillation loss, compiled and not (a thousand
rows at a time, both products for every row, rows weigh alike, the teacher normalised over the draft
vocabulary). Seven rows share a teacher, as in an unroll. Times are
medians of forward and backward together; memory is the peak above what was there before the call.
Bars: a sixth of the eager peak, and no slower.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels import distill_linear as chunked
from draftlab.kernels import distill_triton
from draftlab.kernels.distill import distill
from draftlab.kernels.distill_linear import distill_linear
from draftlab.kernels.distill_plan import RowPlan, plan_rows
from draftlab.kernels.distill_types import Distilled, Loss, Teacher

COPY_RATE, MATRIX_RATE = 4.30e12, 780e12  # of an H200, measured
UNROLL = 7


@dataclass
class Work:
    """Arguments of the loss."""

    hidden: Tensor
    lm_head: Tensor
    teacher: Teacher
    row: Tensor
    plan: RowPlan
    weight: Tensor
    loss: Loss = "soft_ce"
    kl_weight: Tensor | None = None

    def gradients(self, total: Tensor) -> list[Tensor]:
        """Of what wants them."""
        return torch.autograd.grad(
            total, [x for x in (self.hidden, self.lm_head) if x.requires_grad]
        )


def make_work(
    rows: int,
    vocab: int,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    master: bool = False,
    loss: Loss = "soft_ce",
    softcap: float | None = None,
) -> Work:
    """Random work; `master`: lm_head is float32, as under autocast."""
    generator = torch.Generator("cuda").manual_seed(vocab)

    def draw(*shape: int, scale: float = 1.0, as_dtype: torch.dtype = dtype) -> Tensor:
        values = torch.randn(*shape, generator=generator, device="cuda", dtype=torch.float32)
        return values.mul_(scale).to(as_dtype)

    positions = -(-rows // UNROLL)
    last, weights = draw(positions, size), draw(vocab, size, scale=2 * size**-0.5)
    # As much mass outside the draft vocabulary as a twentieth of all.
    teacher = Teacher(last, None, weights, last[:, 0].float(), 1.0, softcap)
    inside = torch.cat(
        [teacher.to_logits(part @ weights.t()).logsumexp(-1) for part in last.split(64)]
    )
    row = torch.randint(positions, (rows,), generator=generator, device="cuda")
    kl_weight = torch.rand(rows, generator=generator, device="cuda") if loss == "lk" else None
    head_dtype = torch.float32 if master else dtype
    return Work(
        draw(rows, size).requires_grad_(),
        draw(vocab, size, scale=2 * size**-0.5, as_dtype=head_dtype).requires_grad_(),
        replace(teacher, logsumexp=inside + 0.05),
        row,
        plan_rows(row),
        torch.rand(rows, generator=generator, device="cuda") / rows,
        loss,
        kl_weight,
    )


def ours(work: Work) -> tuple[Distilled, Tensor, list[Tensor]]:
    arguments = (work.hidden, work.lm_head, work.teacher, work.plan, work.weight)
    out = distill_linear(*arguments, loss=work.loss, kl_weight=work.kl_weight)
    return out, out.total, work.gradients(out.total)


def eager(work: Work) -> tuple[Distilled, Tensor, list[Tensor]]:
    teacher, row = work.teacher, work.row
    with torch.no_grad():
        z = teacher.to_logits(F.linear(teacher.last, teacher.weight))
    logits = F.linear(work.hidden, work.lm_head)
    out = distill(logits, z[row], teacher.logsumexp[row], loss=work.loss, kl_weight=work.kl_weight)
    total = (work.weight * out.loss).sum()
    return out, total, work.gradients(total)


def ligers() -> dict[str, Callable[[Work], object]]:
    """Engines of Liger-Kernel; none without the library."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        print("Liger-Kernel is not installed, so it is left out: pip install liger-kernel")
        return {}

    def engine(compiled: bool) -> Callable[[Work], object]:
        divergence = LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.0, compiled=compiled)  # KL(p ‖ q)

        def liger(work: Work) -> tuple[None, Tensor, list[Tensor]]:
            last, unused = work.teacher.last[work.row], torch.zeros_like(work.row)
            total = divergence(work.hidden, work.lm_head, last, work.teacher.weight, unused)
            return None, total, work.gradients(total)

        return liger

    return {"Liger": engine(False), "Liger, compiled": engine(True)}


def check() -> None:
    """No farther than the eager one from float64, in all dtypes; the host never waits."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst: dict[str, float] = {}
    cases: tuple[tuple[torch.dtype, Loss, int, float | None], ...] = (
        (torch.bfloat16, "soft_ce", 32_003, None),
        (torch.bfloat16, "lk", 4096, 30.0),
        (torch.float16, "soft_ce", 5000, None),
        (torch.float32, "soft_ce", 999, None),
        (torch.float32, "lk", 2500, None),
    )
    for dtype, loss, vocab, softcap in cases:
        work = make_work(700, vocab, 257, dtype, loss=loss, softcap=softcap)
        ours(work)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        found, total, gradients = ours(work)
        torch.cuda.set_sync_debug_mode("default")
        again = ours(work)
        assert torch.equal(found.loss, again[0].loss), "a second run found another loss"
        assert all(map(torch.equal, gradients, again[2])), "a second run found another gradient"
        theirs = eager(work)
        teacher = work.teacher
        exact = eager(
            replace(
                work,
                hidden=work.hidden.detach().double().requires_grad_(),
                lm_head=work.lm_head.detach().double().requires_grad_(),
                teacher=replace(
                    teacher, last=teacher.last.double(), weight=teacher.weight.double()
                ),
            )
        )
        # Products of other shapes round otherwise, where two logits are nearly the same.
        assert (found.best == theirs[0].best).float().mean() > 0.98, "another argmax"
        for name, mine, eagers, true in (
            ("loss", found.loss, theirs[0].loss, exact[0].loss),
            ("alpha", found.alpha, theirs[0].alpha, exact[0].alpha),
            ("total", total, theirs[1], exact[1]),
            ("d_hidden", gradients[0], theirs[2][0], exact[2][0]),
            ("d_lm_head", gradients[1], theirs[2][1], exact[2][1]),
        ):
            size = float(true.detach().norm())
            errors = [float((x.detach() - true.detach()).norm()) / size for x in (mine, eagers)]
            # Sums of rows in float32 differ in their order.
            assert errors[0] <= 1.1 * errors[1] + 2e-6, (dtype, loss, vocab, name, errors)
            worst[str(dtype)[6:]] = max(worst.get(str(dtype)[6:], 0.0), errors[0])
    wide = chunked._adds_wide(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    errors_found = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
    print(f"equal to eager; relative errors against float64 up to {errors_found};")
    print(f"no waits for the host; products are added to float32 in one call: {wide}")


def measure(call: Callable[[], object], count: int = 8) -> tuple[float, float]:
    """Median milliseconds, and the peak in GiB above what was there before."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(count):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[1:]), (torch.cuda.max_memory_allocated() - before) / 2**30


def compare(title: str, work: Work, engines: dict[str, Callable], autocast: bool) -> list[dict]:
    """A line for each engine."""
    (rows, size), vocab = work.hidden.shape, len(work.lm_head)
    products = 2 + work.lm_head.requires_grad
    ideal = 2 * size * vocab * (products * rows + len(work.plan.positions)) / MATRIX_RATE * 1e3
    found: list[dict] = []
    for name, engine in engines.items():
        context = torch.autocast("cuda", torch.bfloat16) if autocast else nullcontext()
        with context:
            milliseconds, peak = measure(lambda: engine(work))  # noqa: B023
        found.append({"work": title, "engine": name, "ms": milliseconds, "peak_gib": peak})
    for line in found:
        ratio = ""
        if len(found) > 1 and line["engine"] != "eager":
            base = next(x for x in found if x["engine"] == "eager")
            times, peaks = line["ms"] / base["ms"], line["peak_gib"] / base["peak_gib"]
            ratio = f"{times:5.2f} of the time, 1/{1 / peaks:.1f} of the peak"
        print(f"{title:34} {line['engine']:15} {line['ms']:7.2f} {ideal / line['ms']:5.0%} "
              f"{line['peak_gib']:6.2f} {ratio}", flush=True)  # fmt: skip
    return found


def kernel_alone(work: Work) -> list[dict]:
    """The kernel on one chunk of 2,048 rows, with several tilings."""
    vocab, plan = len(work.lm_head), work.plan
    rows = slice(0, 2048)
    pitch = -(-vocab // 16) * 16
    logits, z = (torch.randn(n, pitch, device="cuda").bfloat16() for n in (2048, 2048))
    numbers = torch.zeros(2, len(work.row), device="cuda")
    out = Distilled(numbers[0], numbers[1], torch.zeros_like(work.row))
    moved = 2 * pitch * (3 * 2048 + 2 * int(plan.host[2047] + 1))
    found = []
    usual = distill_triton.TILE, distill_triton.WARPS
    for tile, warps in (usual, (1024, 4), (4096, 16)):
        distill_triton.TILE, distill_triton.WARPS = tile, warps
        milliseconds, _ = measure(
            lambda: distill_triton.distill_rows(
                logits[:, :vocab], z[:, :vocab], rows, plan, work.teacher, work.weight, None,
                "soft_ce", True, out,
            )
        )  # fmt: skip
        found.append({"kernel": [tile, warps], "vocab": vocab, "us": milliseconds * 1e3})
    distill_triton.TILE, distill_triton.WARPS = usual
    timings = ", ".join(f"{tuple(x['kernel'])} {x['us']:.0f} µs" for x in found)
    share = moved / COPY_RATE * 1e6 / found[0]["us"]
    print(f"kernel, 2,048 rows, D {vocab:,}: (tile, warps) {timings}; {share:.0%} of copy speed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the figures go")
    options = parser.parse_args()
    began = time.time()
    print(torch.cuda.get_device_name(), torch.__version__)
    check()
    print(f"{'R × H × D':34} {'':15} {'ms':>7} {'ideal':>5} {'GiB':>6} against eager")
    results = []
    everyone = {"ours": ours, "eager": eager} | ligers()
    two = {"ours": ours, "eager": eager}
    for vocab in (32_000, 128_256):
        work = make_work(8192, vocab, 4096)
        results += compare(f"8192 × 4096 × {vocab}", work, everyone, False)
        if vocab == 32_000:
            work.lm_head.requires_grad_(False)
            results += compare("the same, lm_head frozen", work, two, False)
            work = make_work(8192, vocab, 4096, master=True)
            results += compare("the same, autocast of float32", work, two, True)
        results += kernel_alone(work)
        del work
        torch.cuda.empty_cache()
    work = make_work(UNROLL * 5734, 32_000, 4096, master=True)
    results += compare("40138 × 4096 × 32000, autocast", work, {"ours": ours}, True)
    print(f"{time.time() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
