"""The threads of decoding on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from draftlab.target_model.model import Target

SMALL_TARGET_BYTES = 128 * 2**20
"""Weights of a target that one thread decodes. A step of such a target has operations of
microseconds, and handing them to a second thread took 1.6 times as long in wall time and 1.75 times
the CPU seconds (docs/benchmarks.md)."""


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one CPU thread inside the block."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def decoding_threads(target: Target) -> Iterator[None]:
    """Limit torch to one CPU thread inside the block if the target is small."""
    size = sum(p.numel() * p.element_size() for p in target.model.parameters())
    if size > SMALL_TARGET_BYTES:
        yield
        return
    with one_thread(target.device):
        yield
