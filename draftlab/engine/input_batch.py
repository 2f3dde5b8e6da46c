"""The persistent input batch: device state of the running requests, one slot each.

A decode step reads and writes these static buffers only, so a captured CUDA graph can be replayed
while requests come and go. The last slot is a dummy of length 0 that pads a graph's batch.
`kernels/step_layout/types.py` describes the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from draftlab.engine.sampling import Request, sampling_metadata
from draftlab.kernels.sampling.types import SamplingMetadata
from draftlab.kernels.step_layout.types import SlotBuffers
from draftlab.target_model.packed_rows import copy_to_device


class InputBatch(SlotBuffers):
    """State of `num_slots` requests and of the dummy.

    Args:
        num_slots: number of requests.
        k: drafts a step.
        table_width: blocks of a request.
        draft_vocab: size and dtype of the draft distributions; None: all drafts are argmaxes.
        sampling: `Drafter.sampling`, called once a request; with `draft_vocab`.
        confidence: whether drafts have one.
    """

    def __init__(
        self,
        num_slots: int,
        k: int,
        table_width: int,
        device: torch.device,
        *,
        draft_vocab: tuple[int, torch.dtype] | None,
        sampling: Callable[[SamplingMetadata], tuple[Tensor, Tensor]] | None = None,
        confidence: bool = False,
    ) -> None:
        self.num_slots, self.dummy, self.device = num_slots, num_slots, device
        self._draft_sampling = sampling

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        super().__init__(
            length=zeros(),
            newest=zeros(),
            stored=zeros(),
            drafts=zeros(k),
            block_table=zeros(table_width, dtype=torch.int32),
            keys=SamplingMetadata(
                temperature=zeros(dtype=torch.float32),
                top_k=zeros(),
                top_p=torch.ones(num_slots + 1, device=device),
                seed=zeros(),
                prompt=zeros(),
            ),
        )
        if draft_vocab is not None:
            size, dtype = draft_vocab
            self.sampling = zeros(dtype=torch.float32), zeros(dtype=torch.bool)
            self.draft_logits = zeros(k, size, dtype=dtype)
            self.draft_log_sum = zeros(k, dtype=torch.float32)
        if confidence:
            self.confidence = zeros(k, dtype=torch.float32)

    def index(self, slots: Sequence[int], size: int | None = None) -> Tensor:
        """Return slot numbers int64 [B] on the device, padded to `size` with the dummy."""
        padding = [self.dummy] * ((size or len(slots)) - len(slots))
        return self.to_device([*slots, *padding], torch.int64)

    def to_device(self, values: Sequence, dtype: torch.dtype) -> Tensor:
        """Copy a short host list to the device without waiting for it."""
        return copy_to_device(torch.tensor(values, dtype=dtype), self.device)

    def set_requests(self, index: Tensor, requests: Sequence[Request]) -> None:
        """Write the sampling parameters of the requests in slots `index`."""
        metadata = sampling_metadata(requests, torch.device("cpu"))
        pairs = [(getattr(self.keys, f.name), getattr(metadata, f.name)) for f in fields(metadata)]
        if self.sampling is not None and self._draft_sampling is not None:
            pairs += zip(self.sampling, self._draft_sampling(metadata), strict=True)
        for buffer, values in pairs:
            buffer[index] = values.to(self.device, non_blocking=True)

    def set_blocks(self, index: Tensor, blocks: Sequence[Sequence[int]]) -> None:
        """Write the rows of slots `index` in the block table, padded with block 0."""
        width = self.block_table.shape[1]
        rows = [[*each, *[0] * (width - len(each))] for each in blocks]
        self.block_table[index] = self.to_device(rows, torch.int32)
