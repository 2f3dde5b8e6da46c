"""What launches of kernels share: sizes of grids, options, and programmatic dependent launch.

With it a kernel starts while its predecessor still runs.

A chain of short kernels leaves the memory bus idle between kernels: the last programs drain, the
next grid is launched, its first loads travel. With the launch attribute set, the grid of kernel
n + 1 may take free multiprocessors as soon as every program of kernel n has called
`gdc_launch_dependents` (or has ended), and may do work without dependencies, such as prefetching
weights, before it calls `gdc_wait`.

Why a chain of such kernels is correct. `gdc_wait` returns when the previous grid has *completed*
and its writes are visible. Every program of ours calls it, and before that it touches only weights.
So kernel n can only complete after its own wait, hence after kernel n − 1 has completed: by
induction everything older is complete too, although n + 1 may have been started while n − 1 still
ran. Nothing is written before the wait, so a buffer that an older kernel still reads cannot be
overwritten. A kernel launched without the attribute starts after its predecessor has completed,
whatever that predecessor triggered. A started grid cannot starve the one it waits for, because it
starts only once all programs of that one are on the device.

Weights are read before the wait: after changing weights on the device, call
`torch.cuda.synchronize` before the next step. Graph capture keeps the attribute as an edge.

Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch

ENABLED = True
"""Whether kernels overlap in this way; results do not depend on it. Read at every launch."""
FP_FUSION = {"enable_fp_fusion": True}
"""An option of every launch: a multiplication and the addition after it round once, as tested.
Triton 3.10 fuses them only with this option."""


@lru_cache
def supported(device: torch.device) -> bool:
    """Return whether the device (Hopper and later) and Triton support dependent launches."""
    if device.type != "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return False
    from triton.backends.nvidia.compiler import CUDAOptions

    has_option = "launch_pdl" in CUDAOptions.__dataclass_fields__
    return has_option and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Return a launch's keyword arguments: the kernel's constexpr GDC, and Triton's options."""
    if not supported(device):
        return {"GDC": False} | FP_FUSION
    return {"GDC": True, "launch_pdl": ENABLED} | FP_FUSION


# triton.cdiv and triton.next_power_of_2 take the host 3 µs a call, 200 times in a training step.
def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the least power of 2 that is at least n, for n ≥ 1."""
    return 1 << (n - 1).bit_length()
