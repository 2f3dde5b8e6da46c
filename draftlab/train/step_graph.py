"""The forward and backward pass of an optimizer step as one CUDA graph.

A step of a small head takes a GPU less time than the host needs to queue its 1,700 kernels. A graph
of them is queued by one call. It repeats the shapes and addresses of the step that was captured:
batches have `FixedSizes` and are copied into the captured one. Gradients stay at their addresses,
which the optimizer reads; the next step overwrites them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.kernels.devices import use_device
from draftlab.train.batch.packing import Batch, map_tensors
from draftlab.train.distributed.backends import DistillationModule
from draftlab.train.fast.ttt import FastUnroll
from draftlab.train.flops import kept_bytes
from draftlab.train.objectives.loss import LossTerms, Sums
from draftlab.train.settings import TrainSettings

MOST_SECONDS = 0.04
"""Time of a step's products at the GPU's measured rate up to which the host is the limit. The whole
step takes a GPU not quite twice as long, and its launches a host 54 to 85 ms whatever their sizes.
A graph of longer steps would save nothing, and its padding would cost a few percent."""
_USABLE_MEMORY = 0.8
"""Share of the memory beside weights, gradients and moments that activations may take."""
_WARM_UPS = 3
"""Passes before the capture, which compile kernels and choose their tiles."""


def supports_graph(
    module: DistillationModule, settings: TrainSettings, device: torch.device
) -> bool:
    """Return whether the steps of one process can be captured.

    A step must be one pass of the chains' fast forward with a loss that needs no other row's value,
    on a GPU that has memory for a second step: a batch that does not fit the sizes runs beside the
    graph.
    """
    forward, head = module.head_forward, module.head
    return (
        device.type == "cuda"
        and isinstance(forward, FastUnroll)
        and not forward.in_fp8
        and module.objective.sampling is None
        and not module.objective.imitates_states
        and module.terms in (LossTerms("soft_ce"), LossTerms("lk"))
        and (settings.micro_rows or settings.batch_rows) >= settings.batch_rows
        and settings.anchor_parts == 1
        and two_steps_fit(head, settings, module.dtype)
    )


def two_steps_fit(head: DraftHead, settings: TrainSettings, dtype: torch.dtype) -> bool:
    """Return whether the activations that two optimizer steps of one pass save fit on the GPU."""
    rows = settings.row_tokens * settings.batch_rows
    saved = 2 * rows * settings.ttt_steps * kept_bytes(head.config, dtype)
    # Gradients and two moments, each as large as the weights, are allocated later.
    later = 3 * sum(p.numel() * p.element_size() for p in head.parameters() if p.requires_grad)
    free, _ = torch.cuda.mem_get_info(head.fc.weight.device)
    return saved < _USABLE_MEMORY * (free - later)


class StepGraph:
    """Runs the passes of steps whose batches have one set of `FixedSizes`, by one graph."""

    def __init__(self, module: DistillationModule, device: torch.device) -> None:
        self._module, self._device = module, device
        self._trained = [p for p in module.head.parameters() if p.requires_grad]
        self._weights: Sequence[float] | None = None  # of the captured step

    def __call__(self, batch: Batch, weights: Sequence[float], num_anchors: int) -> Sums:
        """Set the gradients of the loss divided by N_0, and return the sums of the rows.

        The next call overwrites both.
        """
        with use_device(self._device):
            if self._weights != weights:
                self._capture(batch, weights)
            torch._foreach_copy_(self._inputs, _tensors(batch))
            self._divisor.fill_(max(1, num_anchors))
            self._graph.replay()
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = gradient  # the optimizer drops them
        return self._sums

    def _capture(self, batch: Batch, weights: Sequence[float]) -> None:
        """Capture the passes of a batch, without effect on weights."""
        held = map_tensors(batch, Tensor.clone)
        self._inputs = _tensors(held)
        self._divisor = torch.ones((), device=self._device)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                self._passes(held, weights)
        torch.cuda.current_stream().wait_stream(stream)
        # Threads that load batches allocate pinned memory meanwhile, which a global capture
        # forbids.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self._sums = self._passes(held, weights)
        self._gradients = [parameter.grad for parameter in self._trained]
        self._weights = weights

    def _passes(self, batch: Batch, weights: Sequence[float]) -> Sums:
        """Run both passes; gradients are new tensors, since there are none before."""
        for parameter in self._trained:
            parameter.grad = None
        loss, sums = self._module(batch, weights)
        (loss / self._divisor).backward()
        return sums


def _tensors(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that are on the device."""
    tensors: list[Tensor] = []
    map_tensors(batch, lambda tensor: tensors.append(tensor) or tensor)
    return tensors
