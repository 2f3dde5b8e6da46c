"""A prefill or step whose results are on their way from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from draftlab.engine.generation_state import Sequence
from draftlab.engine.step import StepShape


@dataclass(frozen=True)
class InFlight:
    """A prefill or step whose results are being copied to the host.

    Attributes:
        sequences: the sequences of its rows, each with its epoch at launch.
        result: of `pack_results`.
        ready: event after the copy; None on a CPU.
        shape: of a step, where `AdaptiveSteps` chose it.
        any_behind: whether the draft KV cache lacked positions of some of its rows then.
    """

    sequences: tuple[tuple[Sequence, int], ...]
    result: Tensor
    ready: torch.cuda.Event | None
    shape: StepShape | None = None
    any_behind: bool = False

    def wait(self) -> tuple[float, float]:
        """Wait for the copy; return the times before and after, in seconds."""
        started = perf_counter()
        if self.ready is not None:
            self.ready.synchronize()
        return started, perf_counter()


def copy_to_host(
    sequences: list[Sequence],
    result: Tensor,
    shape: StepShape | None = None,
    *,
    any_behind: bool = False,
) -> InFlight:
    """Start the copy of a result to the host; the arguments are those of `InFlight`."""
    launched = tuple((sequence, sequence.epoch) for sequence in sequences)
    if not result.is_cuda:
        return InFlight(launched, result, None, shape, any_behind)
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    host.copy_(result, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return InFlight(launched, host, ready, shape, any_behind)
