"""A KV cache of rows: row r holds the key of position p in slot p."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftlab.target_model.attention import attention_inputs

# The argument that is a layer's cache: from transformers 5.24 on, before it, and of some recurrent
# layers before it.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name of the cache among a forward pass's parameters."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


class _RowLayer(CacheLayerMixin):
    """A layer's keys and values [rows, kv heads, slots + 1, head_dim]; the last slot is a dummy."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, slots = self.owner.num_rows, self.owner.max_length + 1
        self.keys = key_states.new_zeros(rows, key_states.shape[1], slots, key_states.shape[-1])
        self.values = value_states.new_zeros(
            rows, value_states.shape[1], slots, value_states.shape[-1]
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, slots = (x.to(key_states.device) for x in (self.owner.rows, self.owner.slots))
        # Indices around a slice put the indexed dimensions first: [B, M, kv heads, head_dim].
        index = (rows[:, None], slice(None), slots)
        self.keys[index] = key_states.transpose(1, 2)
        self.values[index] = value_states.transpose(1, 2)
        visible = slice(self.owner.visible)
        return self.keys[:, :, visible][rows], self.values[:, :, visible][rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible, 0

    def get_seq_length(self) -> int:
        return self.owner.visible

    def get_max_length(self) -> int:
        return self.owner.max_length


class RowCache(Cache):
    """Rows of fixed length, written at explicit positions.

    Before each forward pass `at` sets the row and position of every token. Position −1 writes to a
    dummy slot that no mask shows, so padding and rejected tokens leave no trace.

    Args:
        num_layers: layers of the model.
        num_rows: number of sequences.
        max_length: positions in a row.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int) -> None:
        self.num_rows, self.max_length = num_rows, max_length
        self.rows = self.slots = torch.empty(0, dtype=torch.long)
        self.visible = 0
        super().__init__(layers=[_RowLayer(self) for _ in range(num_layers)])

    def at(self, rows: Sequence[int], positions: Tensor, visible: int) -> RowCache:
        """Set B rows for the next forward pass.

        Args:
            rows: the cache rows, all different.
            positions: [B, M] positions of the new tokens, −1 for padding.
            visible: one more than the highest position any query of this pass may see.

        Raises:
            ValueError: the pass does not fit into the cache.
        """
        if visible > self.max_length or max(rows) >= self.num_rows:
            raise ValueError(
                f"rows {list(rows)} up to position {visible - 1} do not fit into {self.num_rows} "
                f"rows of {self.max_length}"
            )
        self.rows = torch.tensor(rows, device=positions.device)
        self.slots, self.visible = positions, visible
        return self

    def attention_context(self, positions: Tensor) -> AbstractContextManager[None]:
        """Mask by the tokens' positions inside the block."""
        return attention_inputs(positions=positions)
