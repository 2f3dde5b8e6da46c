"""Hidden states of a forward pass at layer boundaries. Boundary b is the input of layer b."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from draftlab.errors import UserError


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of a forward pass: those at the requested boundaries, concatenated,
    [B, M, F], and the last ones, before the final norm, [B, M, Ht].
    """

    features: Tensor
    last: Tensor

    @classmethod
    def of(cls, features: Sequence[Tensor], last: Tensor) -> HiddenStates:
        """Concatenate boundary states, [B, M, Ht] as `last` or flat, [B · M, Ht]."""
        joined = torch.cat(features, -1) if features else last[..., :0]
        return cls(joined.view(*last.shape[:-1], joined.shape[-1]), last)

    @classmethod
    def join(cls, parts: Sequence[HiddenStates]) -> HiddenStates:
        """Concatenate passes along their first dimension."""
        return cls(torch.cat([p.features for p in parts]), torch.cat([p.last for p in parts]))


@contextmanager
def recorded_inputs(modules: Mapping[int, nn.Module]) -> Iterator[dict[int, Tensor]]:
    """Yield a mapping that takes the hidden states that enter modules, by boundary."""
    recorded: dict[int, Tensor] = {}

    def record(boundary: int, _module: Any, args: tuple, kwargs: dict) -> None:
        recorded[boundary] = args[0] if args else kwargs["hidden_states"]

    handles = [
        module.register_forward_pre_hook(partial(record, boundary), with_kwargs=True)
        for boundary, module in modules.items()
    ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return (2, N // 2, N − 3), as vLLM and speculators do; other layers if these coincide."""
    boundaries = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
    spare = [b for b in range(1, num_layers + 1) if b not in boundaries]
    while len(boundaries) < 3 and spare:
        boundaries.append(spare.pop())
    return tuple(sorted(boundaries))


def check_boundaries(boundaries: tuple[int, ...], num_layers: int) -> None:
    """Raise a `UserError` if boundaries are unsorted, repeated or outside 0..num_layers."""
    found, possible = list(boundaries), range(num_layers + 1)
    if not found or found != sorted({b for b in found if b in possible}):
        raise UserError(
            f"expected sorted unique boundaries in 0..{num_layers} (the target has {num_layers} "
            f"layers; {num_layers} is the state before the final norm), found {found}",
            do="write layers that the target has, each once, in ascending order",
        )
