"""The error for mistakes that a user can correct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftlab.url_secrets import without_secrets


class UserError(Exception):
    """A mistake that the user can correct. The CLI prints it as a block and exits with code 2.

    Args:
        what: what was expected and what was found.
        where: the file, key or sample with the mistake.
        do: what the user can do.
    """

    def __init__(self, what: str, *, where: str | Path = "", do: str = "") -> None:
        # Messages quote what they found, and a URL there may contain a password.
        what, where, do = (without_secrets(str(text)) for text in (what, where, do))
        self.what, self.where, self.do = what, where, do
        super().__init__(
            "\n".join(line for line in (what, f"at: {where}" if where else "", do) if line)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process raise it with all its parts, its notes among them."""
        return _restore, (type(self), self.what, self.where, self.do), self.__dict__


class NoClusterError(UserError):
    """No Ray cluster answers that can be used."""


def _restore(kind: type[UserError], what: str, where: str, do: str) -> UserError:
    return kind(what, where=where, do=do)
