"""A paged KV cache: blocks of positions from one pool, found through a block table.

The key of position p of row b is in block `block_table[b, p // S]` at offset p % S. The engine
allocates blocks (`engine/scheduler.py`); `at` sets the tables for a forward pass. No row owns
block 0. Slot −1 writes nothing, so padding and positions past the end leave no trace.

Attention reads the pools by a block table. A cache that gathers gives it tensors instead, as models
with latent attention and those that attend in their own code need them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftlab.kernels.compile_ahead import real_tensors
from draftlab.kernels.devices import copy_to_device
from draftlab.kernels.paged_attention import slot_mapping, write_paged
from draftlab.kernels.paged_attention.plan import Read, Writes, plan_reads, plan_writes, write_rows

# The argument that is a layer's cache: from transformers 5.24 on, before it, and of some recurrent
# layers before it.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name of the cache among a forward pass's parameters."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""An operator of `kernels/recurrent_step/` that lacks its pool, rows and counts."""


def row_bytes(pools: Sequence[Tensor]) -> dict[torch.device, int]:
    """Return the bytes of one row (block, request) of some pools on each device."""
    sizes: dict[torch.device, int] = {}
    for pool in pools:
        sizes[pool.device] = sizes.get(pool.device, 0) + pool[0].nbytes
    return sizes


class RecurrentStates:
    """The states of all recurrent layers, in pools of `num_rows` rows, one for each request."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._pools: dict[Any, Tensor] = {}  # [num_rows, …], by the layer and the function in it
        self._steps: list[tuple[Step, Tensor]] = []  # of a verify step, with their pools
        self._rows = self._ones = torch.empty(0, dtype=torch.int64)
        self._lengths: Sequence[int] | None = None

    def at(self, rows: Tensor, lengths: Sequence[int] | None) -> RecurrentStates:
        """Set the next forward pass.

        Args:
            rows: int64 [B], the rows of the pools.
            lengths: tokens of each row, which begins anew at the first column; None: a verify step.
        """
        self._rows, self._lengths = rows, lengths
        self._ones = torch.ones_like(rows)
        self._steps.clear()
        return self

    @property
    def pools(self) -> list[Tensor]:
        """The pools [num_rows, …] of the states that there are."""
        return list(self._pools.values())

    @property
    def is_prompt(self) -> bool:
        """True if the rows of this pass begin anew."""
        return self._lengths is not None

    def lengths(self, device: torch.device) -> Tensor:
        """Return the tokens of each prompt, int64 [B]."""
        return copy_to_device(torch.tensor(self._lengths), device)

    def padding(self, num_tokens: int, device: torch.device) -> Tensor | None:
        """Return bool [B, num_tokens], True behind the end of a prompt; None: there is none."""
        if all(length == num_tokens for length in self._lengths or ()):
            return None
        return torch.arange(num_tokens, device=device) >= self.lengths(device)[:, None]

    def write(self, key: Any, state: Tensor) -> None:
        """Write the rows' states [B, …] after their prompts."""
        if key not in self._pools:
            with real_tensors():
                self._pools[key] = torch.zeros(
                    self.num_rows, *state.shape[1:], dtype=state.dtype, device=state.device
                )
        self._pools[key][self._rows.to(state.device)] = state

    def step(self, key: Any, num_tokens: int, operator: Step) -> Tensor:
        """Return an operator's outputs for the tokens of a verify step.

        The only token of a plain step is kept at once.
        """
        pool = self._pools[key]
        rows = self._rows.to(pool.device)
        if num_tokens == 1:
            return operator(pool, rows, self._ones.to(pool.device))
        self._steps.append((operator, pool))
        return operator(pool, rows, None)

    def keep(self, counts: Tensor) -> None:
        """Keep each row's state after the first `counts` [B] tokens of the verify step."""
        for operator, pool in self._steps:
            operator(pool, self._rows.to(pool.device), counts.to(pool.device))
        self._steps.clear()

    def copy_rows(self, index_from: Tensor, index_to: Tensor) -> None:
        """Copy the states of rows to other rows."""
        for pool in self.pools:
            pool[index_to.to(pool.device)] = pool[index_from.to(pool.device)]


class _PagedLayer(CacheLayerMixin):
    """A layer's pools of keys and values [blocks, block size, kv heads, head_dim]."""

    is_sliding = False

    def __init__(self, owner: PagedCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        blocks = self.owner.num_blocks, self.owner.block_size
        with real_tensors():
            self.keys, self.values = (
                torch.zeros(*blocks, x.shape[1], x.shape[-1], dtype=x.dtype, device=x.device)
                for x in (key_states, value_states)
            )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.owner.gathers:
            return (
                self._write_and_gather(self.keys, key_states),
                self._write_and_gather(self.values, value_states),
            )
        key, value = key_states.transpose(1, 2), value_states.transpose(1, 2)
        pools = self.keys, self.values
        if key.device.type == "cpu":  # planned once for all layers; a GPU needs no plan
            write_rows(key.flatten(0, 1), value.flatten(0, 1), *pools, self.owner.writes)
        else:
            # A pipeline-parallel layer may be on another GPU than the engine's tables.
            write_paged(key, value, *pools, self.owner.slot_mapping.to(key.device))
        return self.keys, self.values

    def _write_and_gather(self, pool: Tensor, states: Tensor) -> Tensor:
        """Write states [B, kv heads, M, width]; return those of all positions that can be seen."""
        # Padding goes to block 0, which no row owns.
        slots = self.owner.slot_mapping.to(pool.device).clamp(min=0)
        pool.flatten(0, 1)[slots] = states.transpose(1, 2)
        rows = pool[self.owner.block_table.to(pool.device).long()]
        return rows.flatten(1, 2)[:, : self.owner.visible].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.visible, 0  # of masks that are tensors (target_model/attention.py)

    def get_seq_length(self) -> int:
        return 0  # rows differ; a layer that reads it needs a replacement (replacements.py)

    def get_max_length(self) -> int:
        return self.owner.block_table.shape[1] * self.owner.block_size


class PagedCache(Cache):
    """Pools of blocks for every layer, read and written through a block table.

    Args:
        num_blocks: blocks in each layer's pool. block_size: positions in a block, S.
        num_rows: rows of recurrent states, for models with recurrent layers; 0: it has none.
        gathers: whether a pass gathers what layers cache for each row, in the order of positions:
            of models that expand it into keys and values (multi-head latent attention, DeepSeek-V2,
            arXiv:2405.04434), and in a `RowCache`.

    Attributes:
        states: recurrent states; None: the model has none.
        block_table: int32 [B, N] of the next forward pass.
        positions: int64 [B, M] of its tokens, −1 for padding.
        slot_mapping: int64 [B, M], the slots that their keys are written to; −1: none.
        visible: positions that are gathered of each row.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_rows: int = 0,
        *,
        gathers: bool = False,
    ) -> None:
        self.num_blocks, self.block_size, self.gathers = num_blocks, block_size, gathers
        self.visible = 0
        self.states = RecurrentStates(num_rows) if num_rows else None
        self.block_table = torch.empty(0, 0, dtype=torch.int32)
        self.positions = self.slot_mapping = torch.empty(0, 0, dtype=torch.int64)
        self._reads: dict[tuple[Any, ...], list[Read]] = {}
        self._writes: Writes | None = None
        super().__init__(layers=[_PagedLayer(self) for _ in range(num_layers)])

    def at(
        self,
        block_table: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        rows: Tensor | None = None,
        lengths: Sequence[int] | None = None,
    ) -> PagedCache:
        """Set the tables of the next forward pass; rows and lengths are `RecurrentStates.at`'s."""
        if self.states is not None:
            self.states.at(rows, lengths)
        self.block_table, self.positions = block_table, positions
        self.slot_mapping, self.visible = slot_mapping, block_table.shape[1] * self.block_size
        self._reads.clear()
        self._writes = None
        return self

    def reads(
        self, group: int, dtype: torch.dtype, window: int | None, chunk: int | None = None
    ) -> list[Read]:
        """Return the read plan of this pass, shared by layers with the same mask rule; for CPUs."""
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
        """The write plan of this pass, shared by all layers; for CPUs."""
        if self._writes is None:
            self._writes = plan_writes(self.slot_mapping)
        return self._writes

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        """Return True: recurrent layers get no padding here that a model would have to mask."""
        return True

    @property
    def pools(self) -> list[Tensor]:
        """Keys and values of each layer that has any."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        return [pool for layer in layers for pool in (layer.keys, layer.values)]


class RowCache(PagedCache):
    """A cache that gathers, with a block of `max_length` positions for each row: row r has block
    r + 1.
    """

    def __init__(self, num_layers: int, num_rows: int, max_length: int) -> None:
        super().__init__(num_layers, num_rows + 1, max_length, gathers=True)

    def at_rows(self, rows: Sequence[int], positions: Tensor, visible: int) -> RowCache:
        """Set B rows for the next forward pass; raise a `ValueError` if the pass does not fit into
        the cache.

        Args:
            rows: the cache rows, all different.
            positions: [B, M] positions of the new tokens, −1 for padding.
            visible: one more than the highest position any query of this pass may see.
        """
        if visible > self.block_size or max(rows) + 1 >= self.num_blocks:
            raise ValueError(
                f"rows {list(rows)} up to position {visible - 1} do not fit into "
                f"{self.num_blocks - 1} rows of {self.block_size}"
            )
        table = torch.tensor(rows, dtype=torch.int32, device=positions.device)[:, None] + 1
        self.at(table, positions, slot_mapping(table, positions, self.block_size))
        self.visible = visible
        return self
