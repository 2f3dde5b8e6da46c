"""Time the distillation loss beside the eager loss and Liger-Kernel's, on a GPU.

    python eval/lab/kernel_times.py [--vocab 32000,128256] [--rows 8192]

Prints the median time of forward and backward together and the peak memory above what the inputs
take. Seven rows share a teacher, as in seven unrolled steps. Liger-Kernel's fused linear loss is
timed where it is installed (`pip install liger-kernel`): it takes 1,000 rows at a time, weighs rows
alike and normalises the teacher over the draft vocabulary.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.kernels.distill_linear import distill_linear
from draftlab.kernels.distill_plan import plan_rows
from tests.helpers.distill_cases import at_once, gradients, make_case

UNROLLED, HIDDEN = 7, 4096


def liger(compiled: bool) -> Callable[[dict], object] | None:
    """Return Liger-Kernel's loss with its backward pass; None if it is not installed."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return None
    divergence = LigerFusedLinearJSDLoss(0.0, 1.0, beta=0.0, compiled=compiled)  # KL(p ‖ q)

    def run(case: dict) -> dict[str, Tensor]:
        teacher, labels = case["teacher"], torch.zeros_like(case["row"])
        last = teacher.last[case["row"]]
        total = divergence(case["hidden"], case["lm_head"], last, teacher.weight, labels)
        return gradients(case, total, 1.0)

    return run


def fused(case: dict) -> object:
    """Run the loss as training does, with its backward pass."""
    arguments = {name: value for name, value in case.items() if name not in ("row", "plan")}
    out = distill_linear(**arguments, plan=case["plan"])
    return gradients(case, out.total, 1.0)


def eager(case: dict) -> object:
    """Run the loss on the logits of all rows at once, with its backward pass."""
    return at_once(case, 1.0)


def measure(run: Callable[[dict], object], case: dict, repeats: int = 8) -> tuple[float, float]:
    """Return median milliseconds, and the peak in GiB above what was allocated before."""
    run(case)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(case)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[1:]), (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", default="32000,128256", help="draft vocabularies")
    parser.add_argument("--rows", type=int, default=8192)
    options = parser.parse_args()
    engines = {
        "draftlab": fused,
        "eager": eager,
        "Liger-Kernel": liger(False),
        "Liger-Kernel, compiled": liger(True),
    }
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for vocab in map(int, options.vocab.split(",")):
        positions = -(-options.rows // UNROLLED)
        sizes = options.rows, positions, vocab, HIDDEN, HIDDEN
        case = make_case(*sizes, dtype=torch.bfloat16, device="cuda")
        case["plan"] = plan_rows(case["row"])
        for name, run in engines.items():
            if run is None:
                print(f"{name}: not installed")
                continue
            milliseconds, peak = measure(run, case)
            print(f"{options.rows} x {HIDDEN} x {vocab}  {name:24} {milliseconds:8.2f} ms "
                  f"{peak:6.2f} GiB", flush=True)  # fmt: skip
        del case


if __name__ == "__main__":
    main()
