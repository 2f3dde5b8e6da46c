"""A head in other programs' layouts. An export renames, fills and casts; it never computes."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from pydantic import field_validator

from draftlab.base import Knobs, UserError
from draftlab.export.speculators import export_speculators

LAYOUTS: dict[str, Callable[..., Path]] = {"speculators": export_speculators}


def find_layout(name: str) -> Callable[..., Path]:
    """The exporter of a layout.

    Raises:
        UserError: for an unknown layout, with the nearest known name.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    near = difflib.get_close_matches(name.lower(), LAYOUTS, n=1, cutoff=0.5)
    raise UserError(
        f"expected a layout out of {', '.join(sorted(LAYOUTS))}; found {name!r}",
        do=f"did you mean {near[0]!r}?" if near else "",
    )


class ExportKnobs(Knobs):
    """Which layouts a head is exported to, and how."""

    formats: tuple[str, ...] = ("speculators",)
    """Layouts to write, each into a folder of its own name."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Of floating tensors; None: the dtype the head is stored in."""
    k: int | None = None
    """Speculative tokens a server drafts by default; None: as many as the head was trained for."""

    @field_validator("formats")
    @classmethod
    def _known(cls, formats: tuple[str, ...]) -> tuple[str, ...]:
        for name in formats:
            try:
                find_layout(name)
            except UserError as error:
                raise ValueError(str(error)) from None
        return formats

    @field_validator("k")
    @classmethod
    def _positive(cls, k: int | None) -> int | None:
        if k is not None and k < 1:
            raise ValueError(f"expected at least 1 speculative token, found {k}")
        return k
