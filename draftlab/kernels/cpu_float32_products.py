"""Float32 products on a CPU by oneDNN in place of torch's BLAS.

The BLAS of torch's x86 builds, MKL, uses AVX-512 on Intel's processors alone: on AMD's, oneDNN
multiplies float32 matrices 2.3 times as fast (docs/benchmarks.md). torch has no switch that chooses
oneDNN for float32. It goes there when the precision of products is "medium", which permits oneDNN
to round the factors to bfloat16. oneDNN does so on CPUs with AMX only, and there it is left alone:
products stay float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

_PROBE_SIZE = 64
_TOLERANCE = 1e-5
"""Largest error of a probe's product, as a share of its largest entry. Float32 has about 1e-7, and
factors in bfloat16 about 1e-3."""


class _Setting:
    """torch's precision of float32 products, "medium" while any thread is inside the block."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("medium")
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.set_float32_matmul_precision(self._before)


_medium = _Setting()


@contextmanager
def onednn_products(device: torch.device) -> Iterator[None]:
    """Have float32 products on a CPU computed by oneDNN inside the block, if they stay as precise.

    Without AVX-512, torch's BLAS computes them as before. The setting belongs to the process and to
    all devices, so that it is left alone if there is a GPU, whose products it would change.
    """
    if device.type == "cpu" and not torch.cuda.is_available() and _is_precise():
        with _medium:
            yield
    else:
        yield


@cache
def _is_precise() -> bool:
    """Return whether products at precision "medium" are float32 on this machine.

    False also if the caller has set precisions by torch's newer interface, which this one refuses.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, _PROBE_SIZE, _PROBE_SIZE, generator=generator)
    exact = a.double() @ b.double()
    try:
        with _medium:
            error = (a @ b - exact).abs().max()
    except RuntimeError:
        return False
    return bool(error <= _TOLERANCE * exact.abs().max())
