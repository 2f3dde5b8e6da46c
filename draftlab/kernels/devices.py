"""The current GPU, and memory: returned to the device or to the system, reused, or running out."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TypeVar

import torch
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.kernels.compile_ahead import is_fake

_Module = TypeVar("_Module", bound=nn.Module)


def use_device(device: torch.device) -> torch.cuda.device:
    """Return a context in which a GPU is the current device; for a CPU it does nothing.

    Triton launches on the current GPU; CUDA graphs and events belong to its streams.
    """
    return torch.cuda.device(device if device.type == "cuda" else -1)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without waiting for the device."""
    if device.type != "cuda" or is_fake():
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


_STAGED = 64 * 2**20
"""Bytes of a pinned buffer of `to_device`."""


def to_device(module: _Module, device: torch.device | str) -> _Module:
    """Move a module to a device, as `Module.to`.

    To a GPU large parameters go through two pinned buffers, which all threads fill: five times as
    fast as from the memory of files, which the driver reads with one thread.
    """
    device = torch.device(device)
    large = [p for p in module.parameters() if p.nbytes >= _STAGED and _is_plain(p)]
    if device.type == "cuda" and large:
        pinned = [torch.empty(_STAGED, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        buffers = cycle([(buffer, torch.cuda.Event()) for buffer in pinned])
        for parameter in large:
            parameter.data = _through_buffers(parameter.data, device, buffers)
        torch.cuda.synchronize(device)
    return module.to(device)


def _is_plain(parameter: nn.Parameter) -> bool:
    on_cpu = parameter.device.type == "cpu"
    return type(parameter) is nn.Parameter and on_cpu and parameter.is_contiguous()


def _through_buffers(
    values: Tensor, device: torch.device, buffers: Iterator[tuple[Tensor, torch.cuda.Event]]
) -> Tensor:
    """Return a copy on a GPU; each buffer is filled once its last copy, if any, has ended."""
    result = torch.empty_like(values, device=device)
    parts = (x.flatten().view(torch.uint8).split(_STAGED) for x in (values, result))
    with use_device(device):
        for source, part in zip(*parts, strict=True):
            buffer, copied = next(buffers)
            copied.synchronize()
            part.copy_(buffer[: len(source)].copy_(source), non_blocking=True)
            copied.record()
    return result


def free_memory() -> None:
    """Collect garbage and return unused GPU memory to the driver, for other processes too.

    Models and optimizers are full of reference cycles, which Python would collect much later.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def frozen_gc_heap() -> Iterator[None]:
    """Collect garbage now, and let later collections skip all objects that exist now.

    A collection of all objects of torch and transformers takes 0.2 to 0.3 s, the time of hundreds
    of short steps, and would hit one configuration by chance. Servers do the same.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def out_of_memory_error(work: str, do: str) -> Iterator[None]:
    """Raise a `UserError` in place of torch's error when a GPU's memory runs out in the block.

    Args:
        work: what runs in the block, such as "decoding".
        do: the settings to lower.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{work} ran out of GPU memory: {first_line}", do=do) from error


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt, from malloc.h
_MAPPED_FROM = 256 * 2**20
"""Bytes from which on a tensor is mapped by itself. Smaller ones come from the heap."""
_KEPT = 512 * 2**20
"""Bytes of freed memory that the heap keeps at most at its end."""


@contextmanager
def reuse_freed_memory() -> Iterator[None]:
    """Let tensors on a CPU reuse freed memory inside the block, and give it back at its end.

    glibc maps each large tensor anew and gives it back when it is freed, so that the kernel clears
    its pages again and again: a quarter of the CPU seconds of a recording.

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
