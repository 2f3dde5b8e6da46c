"""What the device knows of the requests in work: one entry a slot, in static buffers.

A decode step reads and writes these buffers only, so a captured CUDA graph can be replayed while
requests come and go. The last slot is a dummy of length 0 that fills up a graph's batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.decode.sampling import Request, row_keys
from draftlab.kernels.verify import RowKeys


class Slots:
    """State of `num_slots` requests and the dummy.

    Args:
        num_slots: requests at once.
        k: drafts a step.
        table_width: blocks that a row can own.
        draft_vocab: entries and dtype of the drafts' distributions; None without.

    Attributes:
        length: int64 [R + 1], tokens known (prompt and answer); the newest has no key cached yet.
        newest: int64 [R + 1], the last known token.
        drafts: int64 [R + 1, K], proposed to follow it.
        draft_logits: [R + 1, K, W], what sampled drafts were drawn from; None without.
        draft_log_sum: float32 [R + 1, K], logsumexp of those over the draft temperature.
        block_table: int32 [R + 1, N].
        keys: sampling parameters and noise keys, each [R + 1].
    """

    def __init__(
        self,
        num_slots: int,
        k: int,
        table_width: int,
        device: torch.device,
        *,
        draft_vocab: tuple[int, torch.dtype] | None,
    ) -> None:
        self.num_slots, self.dummy, self.device = num_slots, num_slots, device
        entries = num_slots + 1
        ints = {"dtype": torch.int64, "device": device}
        self.length = torch.zeros(entries, **ints)
        self.newest = torch.zeros(entries, **ints)
        self.drafts = torch.zeros(entries, k, **ints)
        self.block_table = torch.zeros(entries, table_width, dtype=torch.int32, device=device)
        self.draft_logits = self.draft_log_sum = None
        if draft_vocab is not None:
            size, dtype = draft_vocab
            self.draft_logits = torch.zeros(entries, k, size, dtype=dtype, device=device)
            self.draft_log_sum = torch.zeros(entries, k, device=device)
        self.keys = RowKeys(
            torch.zeros(entries, device=device),
            torch.zeros(entries, **ints),
            torch.ones(entries, device=device),
            torch.zeros(entries, **ints),
            torch.zeros(entries, **ints),
        )

    def index(self, slots: Sequence[int], size: int | None = None) -> Tensor:
        """Slot numbers int64 [B] on the device, filled up to `size` with the dummy."""
        padding = [self.dummy] * ((size or len(slots)) - len(slots))
        return self.to_device([*slots, *padding], torch.int64)

    def to_device(self, values: Sequence, dtype: torch.dtype) -> Tensor:
        """A small host list as a tensor, without waiting for the device."""
        host = torch.tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return host
        return host.pin_memory().to(self.device, non_blocking=True)

    def admit(self, index: Tensor, requests: Sequence[Request]) -> None:
        """Writes the sampling parameters of requests that take the slots `index`."""
        found = row_keys(requests, torch.device("cpu"))
        for name in ("temperature", "top_k", "top_p", "seed", "prompt"):
            values = getattr(found, name)
            getattr(self.keys, name)[index] = values.to(self.device, non_blocking=True)

    def own(self, slot: int, blocks: Sequence[int]) -> None:
        """Writes a slot's row of the block table; what it does not own is block 0."""
        padding = [0] * (self.block_table.shape[1] - len(blocks))
        self.block_table[slot] = self.to_device([*blocks, *padding], torch.int32)
