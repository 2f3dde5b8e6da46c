"""A paged key-value cache: blocks of positions from one pool, found through a table of blocks.

The key of position p of row b lies in block `block_table[b, p // S]` at offset p % S. Where each
row's blocks are is the engine's business (`engine/block_pool.py`); a forward pass is aimed by `at`.
Block 0 is nobody's. A slot of −1 writes nothing, so padding and positions past the end leave no
trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftlab.kernels.paged_attention import write_paged
from draftlab.kernels.paged_plan import Read, Writes, plan_reads, plan_writes, write_rows
from draftlab.target_model.attention import paged_step, step_positions


class _PagedLayer(CacheLayerMixin):
    """One layer's pools [blocks, block size, kv heads, head_dim]."""

    is_sliding = False

    def __init__(self, owner: PagedCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = (
            states.new_zeros(
                self.owner.num_blocks, self.owner.block_size, states.shape[1], states.shape[-1]
            )
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        pools = self.keys, self.values
        if key.device.type == "cpu":  # planned once for all layers; a GPU needs no plan
            write_rows(key.flatten(0, 1), value.flatten(0, 1), *pools, self.owner.writes)
        else:
            # A layer of a spread target may be on another GPU than the engine's books.
            write_paged(key, value, *pools, self.owner.slots.to(key.device))
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return 1, 0  # masks are rules here, not tensors (target_model/attention.py)

    def get_seq_length(self) -> int:
        return (
            0  # rows differ; a layer that asks needs a replacement (target_model/replacements.py)
        )

    def get_max_length(self) -> int:
        return self.owner.block_table.shape[1] * self.owner.block_size


class PagedCache(Cache):
    """Pools of blocks for every layer, written and read through tables.

    Args:
        num_layers: layers of the model.
        num_blocks: blocks in each layer's pool.
        block_size: positions in a block, S.

    Attributes:
        block_table: int32 [B, N] of the next forward pass.
        positions: int64 [B, M] of its tokens, −1 for padding.
        slots: int64 [B, M], where their keys go; −1 nowhere.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.block_table = torch.empty(0, 0, dtype=torch.int32)
        self.positions = self.slots = torch.empty(0, 0, dtype=torch.int64)
        self._reads: dict[tuple[Any, ...], list[Read]] = {}
        self._writes: Writes | None = None
        super().__init__(layers=[_PagedLayer(self) for _ in range(num_layers)])

    def at(self, block_table: Tensor, positions: Tensor, slots: Tensor) -> PagedCache:
        """Aims the next forward pass."""
        self.block_table, self.positions, self.slots = block_table, positions, slots
        self._reads.clear()
        self._writes = None
        return self

    def reads(
        self, group: int, dtype: torch.dtype, window: int | None, chunk: int | None = None
    ) -> list[Read]:
        """`plan_reads` of this pass, made once for all layers of one rule; for CPUs."""
        rule = group, dtype, window, chunk
        if rule not in self._reads:
            self._reads[rule] = plan_reads(
                self.block_table,
                self.positions,
                self.block_size,
                group,
                dtype,
                window=window,
                chunk=chunk,
            )
        return self._reads[rule]

    @property
    def writes(self) -> Writes:
        """`plan_writes` of this pass, made once for all layers; for CPUs."""
        if self._writes is None:
            self._writes = plan_writes(self.slots)
        return self._writes

    @contextmanager
    def step(self, positions: Tensor) -> Iterator[None]:
        """Makes the model's attention read this cache inside the block; `positions` are clamped."""
        with step_positions(positions), paged_step(self):
            yield

    @property
    def key_pool(self) -> list[Tensor]:
        """Keys of each layer."""
        return [layer.keys for layer in self.layers]

    @property
    def value_pool(self) -> list[Tensor]:
        """Values of each layer."""
        return [layer.values for layer in self.layers]
