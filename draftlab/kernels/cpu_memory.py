"""The C library's memory on a machine without a GPU.

glibc maps each large tensor anew and gives it back when it is freed, so that the kernel clears its
pages again and again: a quarter of the CPU seconds of a recording. Tests:
tests/kernels/test_cpu_memory.py.
"""

from __future__ import annotations

import ctypes
import sys

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h
_MAPPED_FROM = 256 * 2**20
"""Bytes from which on a tensor is mapped by itself. Smaller ones come from the heap."""
_KEPT = 512 * 2**20
"""Bytes of freed memory that the heap keeps at most at its end."""


def keep_freed_memory() -> bool:
    """Let tensors on a CPU reuse freed memory; return whether it was done.

    It is not done if there is a GPU, whose tensors have an allocator of their own, and on systems
    with another C library.
    """
    if torch.cuda.is_available() or not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return all([mallopt(_MMAP_THRESHOLD, _MAPPED_FROM), mallopt(_TRIM_THRESHOLD, _KEPT)])
