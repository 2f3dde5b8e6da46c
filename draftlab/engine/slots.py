"""What the device knows of the requests in work: one entry a slot, in static buffers.

A decode step reads and writes these buffers only, so a captured CUDA graph can be replayed while
requests come and go. The last slot is a dummy of length 0 that fills up a graph's batch. What each
buffer holds, and the kernels that read and write them, are in `kernels/step_layout.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch
from torch import Tensor

from draftlab.engine.sampling import Request, row_keys
from draftlab.kernels.rows import RowKeys
from draftlab.kernels.step_layout import SlotBuffers
from draftlab.target_model.packed_rows import sent


class Slots(SlotBuffers):
    """State of `num_slots` requests and the dummy.

    Args:
        num_slots: requests at once.
        k: drafts a step.
        table_width: blocks that a row can own.
        draft_vocab: entries and dtype of the drafts' distributions; None without.
        sampling: `Drafter.sampling`, asked once a request; with `draft_vocab`.
    """

    def __init__(
        self,
        num_slots: int,
        k: int,
        table_width: int,
        device: torch.device,
        *,
        draft_vocab: tuple[int, torch.dtype] | None,
        sampling: Callable[[RowKeys], tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.num_slots, self.dummy, self.device = num_slots, num_slots, device
        self._sampling_of = sampling
        entries = num_slots + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(entries, *shape, dtype=dtype, device=device)

        super().__init__(
            length=zeros(),
            newest=zeros(),
            drafts=zeros(k),
            block_table=zeros(table_width, dtype=torch.int32),
            keys=RowKeys(
                zeros(dtype=torch.float32),
                zeros(),
                torch.ones(entries, device=device),
                zeros(),
                zeros(),
            ),
        )
        if draft_vocab is not None:
            size, dtype = draft_vocab
            self.sampling = zeros(dtype=torch.float32), zeros(dtype=torch.bool)
            self.draft_logits = zeros(k, size, dtype=dtype)
            self.draft_log_sum = zeros(k, dtype=torch.float32)

    def index(self, slots: Sequence[int], size: int | None = None) -> Tensor:
        """Slot numbers int64 [B] on the device, filled up to `size` with the dummy."""
        padding = [self.dummy] * ((size or len(slots)) - len(slots))
        return self.to_device([*slots, *padding], torch.int64)

    def to_device(self, values: Sequence, dtype: torch.dtype) -> Tensor:
        """A small host list as a tensor, without waiting for the device."""
        return sent(torch.tensor(values, dtype=dtype), self.device)

    def admit(self, index: Tensor, requests: Sequence[Request]) -> None:
        """Writes the sampling parameters of requests that take the slots `index`."""
        found = row_keys(requests, torch.device("cpu"))
        pairs = [
            (getattr(self.keys, field.name), getattr(found, field.name)) for field in fields(found)
        ]
        if self.sampling is not None and self._sampling_of is not None:
            pairs += zip(self.sampling, self._sampling_of(found), strict=True)
        for buffer, values in pairs:
            buffer[index] = values.to(self.device, non_blocking=True)

    def own(self, slot: int, blocks: Sequence[int]) -> None:
        """Writes a slot's row of the block table; what it does not own is block 0."""
        padding = [0] * (self.block_table.shape[1] - len(blocks))
        self.block_table[slot] = self.to_device([*blocks, *padding], torch.int32)
