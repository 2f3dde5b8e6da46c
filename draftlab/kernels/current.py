"""Which GPU is the current one: Triton launches there, graphs and events are of its streams."""

from __future__ import annotations

import torch


def made_current(device: torch.device) -> torch.cuda.device:
    """A context in which a GPU is the current one; on a CPU one that does nothing."""
    return torch.cuda.device(device if device.type == "cuda" else -1)
