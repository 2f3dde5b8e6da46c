"""Names of repositories on the Hub."""

from __future__ import annotations

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from draftlab.errors import UserError


def check_repo(name: str, where: str = "command line") -> None:
    """Refuses what is no "org/name"."""
    try:
        validate_repo_id(name)
        if name.count("/") != 1:
            raise HFValidationError("its owner is missing")
    except HFValidationError as error:
        raise UserError(
            f'expected a repository such as "org/name", found {name!r}: {error}', where=where
        ) from None
