"""Conversations side by side in a row on a GPU: every architecture of the tests' zoo.

    python tests/target_model/test_on_gpu.py [--kinds llama,gpt_oss] [--device cpu]

Random models of four layers, hidden size 256; conversations longer than windows, chunks and steps
of temperatures. A line for each:

- float32: the largest difference between states side by side and alone, of the largest state. More
  than 1e-4 fails.
- bfloat16: of the median token, the relative error of its states side by side, and alone, against
  float32's alone. Side by side twice as much (and 0.02) fails.
- kernel: layers whose attention was torch's kernel for packed rows, in bfloat16.
- waits: whether a bfloat16 pass makes the host wait for the device. On a GPU, yes fails.
- recorded: the way in which a recording in bfloat16 takes its passes, and why.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from draftlab.target_model import attention, packed_rows
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.packed_rows import PackedRow
from draftlab.target_model.settings import TargetSettings
from tests.helpers.zoo import ZOO, wide, zoo_folder

LENGTHS = (170, 3, 33, 1, 290)


def texts(target: Target) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, target.vocab_size, (n,), generator=generator) for n in LENGTHS]
    return [row.to(target.device) for row in rows]


def alone(target: Target) -> Tensor:
    """Last states [T, Ht], float32, of passes of their own."""
    return torch.cat([target.states(row[None]).last[0] for row in texts(target)]).float()


class Beside:
    """Passes of all texts side by side; counts those of torch's kernel."""

    def __init__(self, target: Target) -> None:
        self.target, self.kernels = target, 0
        self.ids = torch.cat(texts(target))[None]
        self.packed_row = PackedRow.of(LENGTHS, target.device)

    def __call__(self) -> Tensor:
        """Last states [T, Ht]."""
        original, self.kernels = packed_rows.varlen_attention, 0

        def counted(*args: object) -> Tensor:
            self.kernels += 1
            return original(*args)

        attention.varlen_attention = counted
        try:
            return self.target.states(self.ids, packed_row=self.packed_row).last[0]
        finally:
            attention.varlen_attention = original

    def waits(self) -> str:
        """What torch says of a pass that waits; "no" when it does not."""
        if self.target.device.type != "cuda":
            return "no"
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.packed_row = PackedRow.of(LENGTHS, self.target.device)
            self()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return "no"


def error(found: Tensor, expected: Tensor) -> float:
    """Relative, of the median token."""
    sizes = expected.norm(dim=-1).clamp(min=1e-6)
    return float(((found.float() - expected).norm(dim=-1) / sizes).median())


def line(kind: str, device: str) -> bool:
    """Prints one architecture's; whether it is as it should be."""
    with tempfile.TemporaryDirectory() as name:
        folder = str(zoo_folder(Path(name), kind, **wide(kind)))
        exact, half = (
            load_target(TargetSettings(path=folder, device=device, dtype=dtype))
            for dtype in ("float32", "bfloat16")
        )
    expected, beside = alone(exact), Beside(half)
    difference = float((Beside(exact)() - expected).abs().max() / expected.abs().max())
    errors = error(beside(), expected), error(alone(half), expected)
    kernels, waits = beside.kernels, beside.waits()
    right = difference <= 1e-4 and errors[0] <= max(2 * errors[1], 0.02) and waits == "no"
    way = f"padded: {half.padding_reason}" if half.padding_reason else "side by side"
    end = "" if right else "  WRONG"
    print(
        f"{kind}: float32 {difference:.1e}, bfloat16 {errors[0]:.2g} (alone {errors[1]:.2g}), "
        f"kernel {kernels} of {half.num_layers}, waits: {waits}, recorded {way}{end}",
        flush=True,
    )
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(ZOO))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    right = [line(kind, options.device) for kind in options.kinds.split(",")]
    print(f"{sum(right)} of {len(right)} right")
    sys.exit(not all(right))


if __name__ == "__main__":
    main()
