"""Boundaries: the hidden states that a head reads. Boundary b is the input of layer b."""

from __future__ import annotations

from draftlab.errors import UserError


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return (2, N // 2, N − 3), as vLLM and speculators do; other layers if these coincide."""
    boundaries = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
    spare = [b for b in range(1, num_layers + 1) if b not in boundaries]
    while len(boundaries) < 3 and spare:
        boundaries.append(spare.pop())
    return tuple(sorted(boundaries))


def check_boundaries(boundaries: tuple[int, ...], num_layers: int) -> None:
    """Raise a `UserError` if boundaries are unsorted, repeated or outside 0..num_layers."""
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        raise UserError(
            f"expected sorted unique boundaries, found {list(boundaries)}",
            do="write each layer once, in ascending order",
        )
    if boundaries[0] < 0 or boundaries[-1] > num_layers:
        raise UserError(
            f"expected boundaries in 0..{num_layers} (the target has {num_layers} layers; "
            f"{num_layers} is the state before the final norm), found {list(boundaries)}",
            do="choose layers that the target has",
        )
