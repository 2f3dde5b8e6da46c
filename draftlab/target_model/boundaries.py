"""Boundaries: whose states a head reads. Boundary b is the state that enters layer b."""

from __future__ import annotations

from draftlab.errors import UserError


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """(2, N // 2, N − 3), the choice of vLLM and speculators; mended where shallow ones collide."""
    wanted = sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)})
    spare = [b for b in range(1, num_layers + 1) if b not in wanted]
    while len(wanted) < 3 and spare:
        wanted.append(spare.pop())
    return tuple(sorted(wanted))


def check_boundaries(boundaries: tuple[int, ...], num_layers: int) -> None:
    """Refuses boundaries that are unsorted, repeated or outside 0..num_layers."""
    if not boundaries or list(boundaries) != sorted(set(boundaries)):
        raise UserError(f"expected sorted unique boundaries, found {list(boundaries)}")
    if boundaries[0] < 0 or boundaries[-1] > num_layers:
        raise UserError(
            f"expected boundaries in 0..{num_layers} (the target has {num_layers} layers; "
            f"{num_layers} is the state before the final norm), found {list(boundaries)}"
        )
