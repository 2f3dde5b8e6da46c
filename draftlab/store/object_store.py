"""A folder at a URL (s3://, gs://, hf:// …), whose files are written and read whole, and verified.

Of several processes one may write there, as `UrlClaim` has it.

fsspec's file systems repeat single requests themselves. Here a whole transfer that fails is
repeated for a while, and then a `UserError` names the URL.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from draftlab.errors import UserError
from draftlab.files import read_json, sha256_file, write_json
from draftlab.store.urls import scheme_error
from draftlab.url_secrets import without_secrets

T = TypeVar("T")
A = TypeVar("A")
RETRY_S = 120.0
"""Time for which a transfer that fails is repeated, in seconds."""
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 20.0
"""Pauses between two attempts: each is twice the one before."""
_WARNED_WAIT_S = 4.0
"""The pause before which the user is told that a transfer fails, once."""
PART_BYTES = 1 << 26
"""Size of the parts in which s3fs uploads large files; S3's ETag of such a file depends on it."""
_BLOCK = 1 << 24
CLAIM = "claim.json"
DAMAGED_DOWNLOADS = 3
"""Downloads of the right size with a wrong hash after which the object counts as damaged."""
_PERMANENT = (PermissionError, ImportError, ValueError, TypeError, NotImplementedError)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_NO_CREDENTIALS = re.compile(r"Credential|ProfileNotFound|SSO|TokenRetrieval")


class UnreachableError(UserError):
    """A URL that does not answer. Nothing is known of the files there."""


def _damaged(found: str, where: str) -> UserError:
    """Return the error of an object that is missing or has other bytes than it should."""
    do = "check the URL; a store's folder has manifest.json"
    if where.rpartition("/")[2].startswith("shard-"):
        do = (
            "restore the object from a copy, or remove it and record again with the same recipe: "
            "only missing shards are computed"
        )
    return UserError(found, where=where, do=do)


class UrlFolder:
    """A folder at a URL of `urls.check_url`. Failed transfers are repeated until `cancelled` is
    set.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.cancelled = threading.Event()

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the folder's path in it."""
        import fsspec

        try:
            # Listings and sizes must be the server's present ones.
            return fsspec.core.url_to_fs(self.url, use_listings_cache=False)  # type: ignore[return-value]
        except (ImportError, ValueError) as error:
            raise scheme_error(self.url, error) from None

    def where(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._opened[1].rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in the folder, by name, from one paged listing; raise a
        `UserError` if the URL does not answer, or refuses.
        """
        file_system, root = self._opened

        def listing() -> dict[str, int]:
            file_system.invalidate_cache()
            try:
                entries = file_system.ls(root, detail=True)
            except FileNotFoundError:
                return {}  # object stores have no empty folders
            files = [entry for entry in entries if entry["type"] == "file"]
            return {entry["name"].rpartition("/")[2]: int(entry["size"]) for entry in files}

        return self._retry(listing, "listing the folder")

    def check_bucket(self) -> None:
        """Raise a `UserError` if the bucket of an s3:// or gs:// URL does not exist."""
        file_system, root = self._opened

        def look() -> None:
            with suppress(PermissionError):  # who may read objects may not see their bucket
                file_system.info(root.partition("/")[0])

        if self.url.partition("://")[0].lower() in ("s3", "s3a", "gs", "gcs"):
            self._retry(look, "reading the bucket")

    def size(self, name: str) -> int:
        """Return the size of a file; −1: there is none."""
        return self._retry(lambda: self._size(name), "reading", name, -1)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        file_system, path = self._opened[0], self._path(name)

        def content() -> bytes:
            file_system.invalidate_cache()
            return bytes(file_system.cat_file(path))

        return self._retry(content, "reading", name, None)

    def download(self, name: str, path: Path, size: int | None, sha256: str) -> None:
        """Download a file to `path`; its SHA-256 must be this one, and its size if that is given.

        Raises a `UserError` if there is no such file, it is another one, or as `sizes`.
        """
        damaged = 0

        def attempt() -> None:
            nonlocal damaged
            try:
                self._opened[0].get_file(self._path(name), str(path))
            except FileNotFoundError:
                raise _damaged("the file is missing", self.where(name)) from None
            actual = path.stat().st_size
            if actual != (expected := self._size(name)):
                raise OSError(f"received {actual:,} of {expected:,} bytes")
            if size is not None and actual != size:
                raise _damaged(
                    f"the object is damaged: expected {size} bytes, found {actual}",
                    self.where(name),
                )
            if (digest := sha256_file(path)) == sha256:
                return
            damaged += 1
            if damaged == DAMAGED_DOWNLOADS:
                raise _damaged(
                    f"the object is damaged: expected SHA-256 {sha256}, found {digest}",
                    self.where(name),
                )
            raise OSError(f"received other bytes: SHA-256 {digest}, expected {sha256}")

        self._retry(attempt, "downloading", name)

    def upload(self, path: Path, name: str) -> None:
        """Upload a file, and verify that the server has its bytes.

        The server's size must be the file's. Then the server's own MD5 of what it stored is
        compared, if it states one (S3 as the ETag, GCS); without an MD5 that agrees the file is
        read back and hashed. (The ETag of an encrypted object is none.)

        Raises:
            UserError: see `sizes`.
        """
        protocol = self._opened[0].protocol  # s3fs reads this option; others have their own
        is_s3 = "s3" in ((protocol,) if isinstance(protocol, str) else protocol)
        options = {"chunksize": PART_BYTES} if is_s3 else {}

        def attempt() -> None:
            self._opened[0].put_file(str(path), self._path(name), **options)
            if difference := self._difference(path, name):
                raise OSError(difference)

        self._retry(attempt, "uploading", name)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file."""
        file_system, path = self._opened[0], self._path(name)
        self._retry(lambda: file_system.pipe_file(path, content), "writing", name)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether this call has written it.

        Of two calls at the same moment one returns True where the file system has such a write
        (S3, GCS). Otherwise both may, and one of the contents stays.
        """
        file_system, path = self._opened[0], self._path(name)

        def attempt() -> bool:
            try:
                file_system.pipe_file(path, content, mode="create")
            except FileExistsError:  # perhaps of an attempt whose answer was lost
                return bytes(file_system.cat_file(path)) == content
            except (NotImplementedError, ValueError):  # there is no such write
                if file_system.exists(path):
                    return False
                file_system.pipe_file(path, content)
            return True

        return self._retry(attempt, "writing", name)

    def _difference(self, path: Path, name: str) -> str | None:
        """Return how the object differs from a file; None if it has the same bytes."""
        size, stored = path.stat().st_size, self._size(name)
        if stored != size:
            return f"sent {size:,} bytes, and the server has {stored:,}"
        info = self._opened[0].info(self._path(name))
        stated = {str(info.get("ETag", "")).strip('"'), str(info.get("md5Hash", ""))} - {""}
        if stated and stated & _md5_forms(path):
            return None
        if self._sha256_of_object(name) != sha256_file(path):
            return "the server has other bytes than were sent"
        return None

    def upload_changed(self, path: Path, name: str) -> None:
        """Upload a file unless the folder has its bytes already."""

        def is_same() -> bool:
            return self._difference(path, name) is None

        if not self._retry(is_same, "reading", name, False):
            self.upload(path, name)

    def sha256(self, name: str) -> str | None:
        """Return the hex SHA-256 of a file as it is at the URL; None if there is none."""
        return self._retry(lambda: self._sha256_of_object(name), "reading", name, None)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        path = self._path(name)
        self._retry(lambda: self._opened[0].rm_file(path), "removing", name, None)

    def _size(self, name: str) -> int:
        file_system = self._opened[0]
        file_system.invalidate_cache()
        return int(file_system.info(self._path(name))["size"])

    def _sha256_of_object(self, name: str) -> str:
        digest, expected, received = hashlib.sha256(), self._size(name), 0
        with self._opened[0].open(self._path(name), "rb", block_size=_BLOCK) as file:
            while block := file.read(_BLOCK):
                digest.update(block)
                received += len(block)
        if received != expected:
            raise OSError(f"received {received:,} of {expected:,} bytes")
        return digest.hexdigest()

    def _retry(self, action: Callable[[], T], doing: str, name: str = "", *absent: A) -> T | A:
        """Return the result of an action, which is repeated for `RETRY_S` if it fails.

        Of a file that is not there it is `absent`, if that is given. Errors name what it was
        `doing` ("uploading") to which file ("": the folder): an `UnreachableError` after the last
        attempt, and at once a `UserError` if the server refuses, or the disk's own if this
        machine's is full.
        """
        where = self.where(name) if name else self.url
        started, wait = time.monotonic(), _FIRST_WAIT_S
        while True:
            try:
                return action()
            except UserError:
                raise
            except FileNotFoundError as error:
                if absent:
                    return absent[0]
                raise UserError(
                    f"{doing} failed, since there is no such bucket or folder: {error}",
                    where=where,
                    do="make the bucket, or correct the URL",
                ) from None
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _NO_ROOM:
                    raise  # it is no fault of the server
                kind, passed = type(error).__name__, time.monotonic() - started
                if isinstance(error, _PERMANENT) or _NO_CREDENTIALS.search(kind):
                    raise UserError(
                        f"{doing} was refused: {kind}: {error}",
                        where=where,
                        do="check the credentials and the endpoint in the environment "
                        "(docs/guide/scale.md has their names)",
                    ) from None
                if self.cancelled.is_set() or passed + wait > RETRY_S:
                    raise UnreachableError(
                        f"{doing} failed again and again for {passed:.0f} s, at last with "
                        f"{kind}: {error}",
                        where=where,
                        do="check the network and the server, and the endpoint in the environment; "
                        "nothing is lost: the same command goes on where it stopped",
                    ) from None
                if wait == _WARNED_WAIT_S:
                    warnings.warn(
                        without_secrets(f"{doing} {where} failed: {kind}: {error}")
                        + f"; it is repeated for {RETRY_S:.0f} s",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                self.cancelled.wait(wait)
                wait = min(2 * wait, _MAX_WAIT_S)


def _md5_forms(path: Path) -> set[str]:
    """Return the MD5 of a file as servers state it: hex, base64, and S3's of several parts."""
    whole, parts = hashlib.md5(usedforsecurity=False), []
    with open(path, "rb") as file:
        while block := file.read(PART_BYTES):
            whole.update(block)
            parts.append(hashlib.md5(block, usedforsecurity=False).digest())
    joined = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    forms = {whole.hexdigest(), base64.b64encode(whole.digest()).decode()}
    return forms | {f"{joined}-{len(parts)}"}


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
        """Claim the URL for a purpose; return whose claim has been replaced, and when it was made.

        That is "" without one, or of a process that had the same folder. A claim with another
        purpose is not replaced: it raises a `UserError`, as does a URL that does not answer.
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
        """Raise a `LostClaimError` if another process has claimed the URL since this one did."""
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
