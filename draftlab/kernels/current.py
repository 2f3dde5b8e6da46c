"""GPUs of this process: the current one, on which Triton launches and whose streams graphs and
events are of; and memory, given back."""

from __future__ import annotations

import gc

import torch


def made_current(device: torch.device) -> torch.cuda.device:
    """A context in which a GPU is the current one; on a CPU one that does nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def give_back_memory() -> None:
    """Frees what nothing refers to any more, on GPUs for other processes too.

    What trains or loads is full of cycles, which Python would collect much later.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
