"""The claim of a URL: of several processes one may write there."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import uuid4

from draftlab.errors import UserError
from draftlab.files import read_json, write_json
from draftlab.store.object_store import UrlFolder

CLAIM = "claim.json"


class LostClaimError(UserError):
    """Another process has claimed the URL."""


class UrlClaim:
    """The claim of a URL: one process may write there, the last one that claimed it.

    Object stores have no locks that end with their holder. So a claim is a small object, and the
    holder keeps a copy of it in a folder of its own. Before it writes, a process compares the two.
    A machine that is lost keeps nobody waiting: another one claims the URL, and the first ends with
    an error if it still runs.

    Args:
        remote: the folder at the URL.
        folder: where the holder keeps its copy; all its processes see it.
    """

    def __init__(self, remote: UrlFolder, folder: Path) -> None:
        self.remote, self._file, self.is_held = remote, folder / CLAIM, False

    def take(self, purpose: str) -> str:
        """Claim the URL.

        Args:
            purpose: what is written there; a claim with another one is not replaced.

        Returns:
            Whose claim has been replaced, and when it was made; "": there was none, or it
            was of a process that had the same folder.

        Raises:
            UserError: there is a claim with another purpose, or the URL does not answer.
        """
        since = datetime.now(UTC).isoformat(timespec="seconds")
        own = {"id": uuid4().hex, "host": socket.gethostname(), "since": since, "of": purpose}
        content, former = json.dumps(own).encode(), None
        if not self.remote.create(CLAIM, content):
            former = self._read()
            if former is not None and former.get("of") != purpose:
                raise UserError(
                    f"another run writes there ({_holder(former)})",
                    where=self.remote.url,
                    do="name another folder; or, if that run has been given up, remove "
                    f"{self.remote.where(CLAIM)}",
                )
            self.remote.write(CLAIM, content)
        is_ours = former is None or former.get("id") == self._id
        write_json(self._file, own)
        self.__dict__["_id"], self.is_held = own["id"], True
        return "" if is_ours or former is None else _holder(former)

    @cached_property
    def _id(self) -> str:
        return str(read_json(self._file).get("id")) if self._file.is_file() else ""

    def _read(self) -> dict[str, Any] | None:
        content = self.remote.read(CLAIM)
        if content is None:
            return None
        with suppress(ValueError, RecursionError):
            if isinstance(claim := json.loads(content), dict):
                return claim
        return {}

    def check(self) -> None:
        """Check that no other process has claimed the URL since this one did.

        Raises:
            LostClaimError: one has.
            UserError: the URL does not answer.
        """
        claim = self._read()
        if not self._id or claim is None or claim.get("id") != self._id:
            raise LostClaimError(
                f"another process has begun to write there ({_holder(claim)}), so this one ends"
                if claim
                else f"{CLAIM}, with which this process claimed the URL, has been removed",
                where=self.remote.url,
                do="let one process work; the same command goes on from what is at the URL",
            )

    def release(self) -> None:
        """Remove the claim. One that the URL does not let go is replaced by the next process."""
        with suppress(UserError):
            self.check()
            self.remote.remove(CLAIM)
        self._file.unlink(missing_ok=True)
        self.is_held = False


def _holder(claim: dict[str, Any]) -> str:
    """Return on which machine the process with a claim is, and when it made the claim."""
    return f"on {claim.get('host', 'an unknown machine')}, begun {claim.get('since', '?')}"
