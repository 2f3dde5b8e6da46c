"""What happens to transfers that fail: they are repeated for a while, and then an error says so.

fsspec's file systems repeat single requests themselves; here a whole transfer is one action.
"""

from __future__ import annotations

import errno
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

from draftlab.errors import UserError
from draftlab.store.urls import local_folder

T = TypeVar("T")
RETRY_S = 120.0
"""Time for which a transfer that fails is repeated, in seconds."""
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 20.0
"""Pauses between two attempts: each is twice the one before."""
WARNED_WAIT_S = 4.0
"""The pause before which the user is told that a transfer fails, once."""
_PERMANENT = (PermissionError, ImportError, ValueError, TypeError, NotImplementedError)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_CREDENTIALS = re.compile(r"Credential|ProfileNotFound|SSO|TokenRetrieval")
_SECRETS = re.compile(
    r"(?<=//)[^/@\s]+@|(?<=[?&])(?:X-Amz-\w+|AWSAccessKeyId|Signature|sig|token)=[^&\s'\"]+", re.I
)


class UnreachableError(UserError):
    """A URL that does not answer. Nothing is known of the files there."""


class DamagedError(UserError):
    """A file at a URL that is missing, or has other bytes than it should."""


def plain_error(error: BaseException) -> str:
    """Return an error's text without credentials that a URL in it may have."""
    return _SECRETS.sub("…", str(error)) or "no message"


def repeat_transfer(
    action: Callable[[], T], doing: str, where: str, cancelled: threading.Event
) -> T:
    """Return the result of an action, which is repeated for `RETRY_S` if it fails.

    Args:
        doing: the action, for errors: "uploading".
        where: the URL.
        cancelled: ends the repetition when it is set.

    Raises:
        UserError: there is no such bucket, the server refuses, or the action raises one itself.
        UnreachableError: the last attempt failed, too.
        OSError: this machine's disk is full or read-only, and `where` is not on it.
    """
    started, wait = time.monotonic(), FIRST_WAIT_S
    while True:
        try:
            return action()
        except UserError:
            raise
        except FileNotFoundError as error:
            raise UserError(
                f"{doing} failed, since there is no such bucket or folder: {plain_error(error)}",
                where=where,
                do="make the bucket, or correct the URL",
            ) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                if doing not in ("uploading", "writing") or not local_folder(where):
                    raise  # it is no fault of the server
                raise UserError(
                    f"{doing} failed: {error.strerror}",
                    where=where,
                    do="free space there; the same command goes on where it stopped",
                ) from None
            kind, passed = type(error).__name__, time.monotonic() - started
            if isinstance(error, _PERMANENT) or _NO_CREDENTIALS.search(kind):
                raise UserError(
                    f"{doing} was refused: {kind}: {plain_error(error)}",
                    where=where,
                    do="check the credentials and the endpoint in the environment "
                    "(docs/guide/scale.md has their names)",
                ) from None
            if cancelled.is_set() or passed + wait > RETRY_S:
                raise UnreachableError(
                    f"{doing} failed again and again for {passed:.0f} s, at last with "
                    f"{kind}: {plain_error(error)}",
                    where=where,
                    do="check the network and the server, and the endpoint in the environment; "
                    "nothing is lost: the same command goes on where it stopped",
                ) from None
            if wait == WARNED_WAIT_S:
                warnings.warn(
                    f"{doing} {where} failed: {kind}: {plain_error(error)}; it is repeated for "
                    f"{RETRY_S:.0f} s",
                    RuntimeWarning,
                    stacklevel=2,
                )
            cancelled.wait(wait)
            wait = min(2 * wait, MAX_WAIT_S)


def restore_hint(name: str) -> str:
    """Return what to do about a missing or damaged file."""
    if name.startswith("shard-"):
        return (
            "restore the object from a copy, or remove it and record again with the same recipe: "
            "only missing shards are computed"
        )
    return "check the URL; a store's folder has manifest.json"


def damage_error(expected: str, actual: str, where: str, name: str) -> DamagedError:
    """Return the error of an object that has other bytes than it should."""
    return DamagedError(
        f"the object is damaged: expected {expected}, found {actual}",
        where=where,
        do=restore_hint(name),
    )
