"""Pools of recurrent states, a row for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftlab.target_model.packed_rows import copy_to_device

Step = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""An operator of `kernels/recurrent_step/` that lacks its pool, rows and counts."""


class RecurrentStates:
    """The states of all recurrent layers, a row for each request.

    Args:
        num_rows: rows of the pools.
    """

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
            self._pools[key] = state.new_zeros(self.num_rows, *state.shape[1:])
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

    def row_bytes(self) -> dict[torch.device, int]:
        """Return the bytes of one request's states on each device; there are some after a pass."""
        sizes: dict[torch.device, int] = {}
        for pool in self.pools:
            sizes[pool.device] = sizes.get(pool.device, 0) + pool[0].nbytes
        return sizes
