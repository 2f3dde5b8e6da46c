"""Features of verified positions that the draft model has not seen yet.

While nothing is drafted the head does not run. Its KV cache falls behind, and the features of the
positions that are missing there are kept here. One pass over many positions reads the head's
weights once, so catching up costs a small part of running the head in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.engine.base_drafter import Drafter, VerifiedFeatures
from draftlab.engine.input_batch import InputBatch


class FeatureBacklog:
    """Pairs (x_{p+1}, g_p) of each slot, in the order of their positions.

    Args:
        batch: the input batch, whose slots they belong to.
        width: F, the size of the features.
        dtype: of the features.
        capacity: most positions of a slot.
    """

    def __init__(
        self, batch: InputBatch, width: int, dtype: torch.dtype, capacity: int = 32
    ) -> None:
        self.batch, self.capacity = batch, capacity
        shape = batch.num_slots + 1, capacity
        self.tokens = batch.length.new_zeros(shape)
        self.positions = batch.length.new_zeros(shape)
        self.features = torch.zeros(*shape, width, dtype=dtype, device=batch.device)
        self.count = batch.length.new_zeros(shape[0])

    def append(self, index: Tensor, tokens: Tensor, features: Tensor, positions: Tensor) -> None:
        """Append the pairs of a step without drafts; does not wait for the device.

        Args:
            index: int64 [B], slots.
            tokens, positions: int64 [B, 1]; position −1 (an empty slot) appends nothing.
            features: [B, 1, F].
        """
        at = self.count[index].clamp(max=self.capacity - 1)
        self.tokens[index, at] = tokens[:, 0]
        self.positions[index, at] = positions[:, 0]
        self.features[index, at] = features[:, 0].to(self.features.dtype)
        self.count[index] = self.count[index] + (positions[:, 0] >= 0)

    def clear(self, index: Tensor) -> None:
        """Forget the pairs of slots int64 [B], which new requests enter."""
        self.count.index_fill_(0, index, 0)

    @torch.inference_mode()
    def flush(self, drafter: Drafter, index: Tensor) -> None:
        """Let the drafter extend its cache by the pairs of slots int64 [B]."""
        counts = self.count[index]
        real = torch.arange(self.capacity, device=index.device) < counts[:, None]
        verified = VerifiedFeatures(
            self.tokens[index],
            self.features[index],
            self.positions[index].where(real, -1),
            counts.clamp(min=1),
            self.batch.block_table[index],
            self.batch.keys[index],
        )
        if not index.is_cuda:  # no static shapes: drop columns of padding
            verified = verified.first_columns(int(verified.counts.max()))
        drafter.extend_cache(verified)
        self.clear(index)
