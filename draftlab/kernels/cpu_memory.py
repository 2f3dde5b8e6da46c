"""The C library's memory on a machine without a GPU.

glibc maps each large tensor anew and gives it back when it is freed, so that the kernel clears its
pages again and again: a quarter of the CPU seconds of a recording. Tests:
tests/kernels/test_cpu_memory.py.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h
_MAPPED_FROM = 256 * 2**20
"""Bytes from which on a tensor is mapped by itself. Smaller ones come from the heap."""
_KEPT = 512 * 2**20
"""Bytes of freed memory that the heap keeps at most at its end."""


@contextmanager
def reuse_freed_memory() -> Iterator[None]:
    """Let tensors on a CPU reuse freed memory inside the block, and give it back at its end.

    Otherwise the heap would grow with each block: tensors of other shapes than before find few gaps
    of their size in it. Nothing is done if there is a GPU, whose tensors have an allocator of their
    own, and on systems with another C library.
    """
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    if torch.cuda.is_available() or not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, _MAPPED_FROM)
    library.mallopt(_TRIM_THRESHOLD, _KEPT)
    try:
        yield
    finally:
        gc.collect()
        library.malloc_trim(0)  # also the gaps between tensors in use
