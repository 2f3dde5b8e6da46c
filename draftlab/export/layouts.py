"""Lookup of a program's layout for the heads of a family."""

from __future__ import annotations

from draftlab.errors import UserError
from draftlab.export.layout import Layout
from draftlab.export.settings import check_program
from draftlab.heads.family import get_family


def layout_for(program: str, family: str) -> Layout:
    """Return a program's layout of a family's heads.

    Raises:
        UserError: the program is unknown or cannot load such heads.
    """
    check_program(program)
    layout = get_family(family).layouts().get(program, "no layout has been written for them")
    if isinstance(layout, Layout):
        return layout
    raise UserError(f"{program} cannot hold {get_family(family).title} heads: {layout}")
