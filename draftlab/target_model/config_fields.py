"""Numbers of a target's config that not every architecture has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.formatting import is_positive

_MAX_POSITIONS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""How configs spell the number of positions; the last two are MPT's and BLOOM's."""


def check_rope(config: Any, where: Path) -> None:
    """Check the bases of a target's RoPE.

    Args:
        config: as transformers read it.
        where: the file, for the error.

    Raises:
        UserError: one is no positive finite number.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    for kind in (rope, *rope.values()):  # some targets have one for each kind of attention
        theta = kind.get("rope_theta", 1.0) if isinstance(kind, dict) else 1.0
        if not is_positive(theta):
            raise UserError(
                f"expected a positive finite number as rope_theta, found {theta!r}",
                where=where,
                do="fetch the file again",
            )


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
