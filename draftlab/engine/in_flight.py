"""A prefill or step whose results are on their way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.engine.generation_state import Sequence


@dataclass(frozen=True)
class InFlight:
    """A prefill or step whose results are being copied to the host.

    Attributes:
        sequences: the sequences of its rows, each with its epoch at launch.
        result: of `pack_results`.
        ready: event after the copy; None on a CPU.
    """

    sequences: tuple[tuple[Sequence, int], ...]
    result: Tensor
    ready: torch.cuda.Event | None

    def wait(self) -> None:
        """Wait for the copy."""
        if self.ready is not None:
            self.ready.synchronize()


def copy_to_host(sequences: list[Sequence], result: Tensor) -> InFlight:
    """Start the copy of a result to the host."""
    launched = tuple((sequence, sequence.epoch) for sequence in sequences)
    if not result.is_cuda:
        return InFlight(launched, result, None)
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    host.copy_(result, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return InFlight(launched, host, ready)
