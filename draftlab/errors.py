"""The error that a user can mend."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """A mistake the user can mend. The CLI prints it as one block and exits with code 2.

    Args:
        what: what was expected and what was found.
        where: the file, key or sample it was found at.
        do: what to do about it.
    """

    def __init__(self, what: str, *, where: str | Path = "", do: str = "") -> None:
        self.what, self.where, self.do = what, str(where), do
        super().__init__(
            "\n".join(part for part in (what, f"at: {where}" if where else "", do) if part)
        )
