"""The current GPU, and memory returned to it."""

from __future__ import annotations

import gc

import torch


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
