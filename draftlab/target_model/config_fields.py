"""Numbers of a target's config that not every architecture has."""

from __future__ import annotations

from typing import Any

from draftlab.errors import UserError

_MAX_POSITIONS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""How configs spell the number of positions; the last two are MPT's and BLOOM's."""


def max_positions(config: Any) -> int:
    """Return the largest number of positions of a target.

    Args:
        config: of the target's text model.

    Raises:
        UserError: the config names none.
    """
    for name in _MAX_POSITIONS:
        if (limit := getattr(config, name, None)) is not None:
            return int(limit)
    raise UserError(
        f"expected {_MAX_POSITIONS[0]} in the target's config, found none ({config.model_type})",
        where="target",
        do="write the longest context that it was trained with into a copy of its config.json",
    )
