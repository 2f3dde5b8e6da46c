"""The current GPU, memory returned to it, and memory that runs out."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftlab.errors import UserError


def use_device(device: torch.device) -> torch.cuda.device:
    """Return a context in which a GPU is the current device; for a CPU it does nothing.

    Triton launches on the current GPU; CUDA graphs and events belong to its streams.
    """
    return torch.cuda.device(device if device.type == "cuda" else -1)


def free_memory() -> None:
    """Collect garbage and return unused GPU memory to the driver, for other processes too.

    Models and optimizers are full of reference cycles, which Python would collect much later.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
