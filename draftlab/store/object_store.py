"""A folder at a URL (s3://, gs://, hf:// …), whose files are written and read whole, and verified.

What fails is repeated as a whole (`transfer_errors.py`), and then a `UserError` names the URL.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from draftlab.errors import UserError
from draftlab.files import atomic_path, create_file, sha256_file
from draftlab.formatting import pip_install
from draftlab.store.transfer_errors import (
    DamagedError,
    damage_error,
    plain_error,
    repeat_transfer,
    restore_hint,
)
from draftlab.store.urls import local_folder

T = TypeVar("T")
A = TypeVar("A")
PART_BYTES = 1 << 26
"""Size of the parts in which s3fs uploads large files; S3's ETag of such a file depends on it."""
BLOCK = 1 << 24
DAMAGED_DOWNLOADS = 3
"""Downloads of the right size with a wrong hash after which the object counts as damaged."""


_NO_STORES = ("http", "https", "ftp")
"""Schemes that fsspec knows and at which it cannot replace files as a whole."""


def check_scheme(url: str) -> None:
    """Check, without asking its server, that a store can be written to a URL.

    Raises:
        UserError: its files do not outlive the process, cannot be written, or need a package that
            is not installed.
    """
    import fsspec

    scheme = url.partition("://")[0].lower()
    if scheme == "memory" or scheme in _NO_STORES:
        kind = "whose files outlive this process" if scheme == "memory" else "that can be written"
        raise UserError(
            f"expected a URL {kind}, found {scheme}://",
            where=url,
            do="name a bucket, such as s3://bucket/folder, or a folder, file:///folder",
        )
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise _scheme_error(url, error) from None


def _scheme_error(url: str, error: Exception) -> UserError:
    scheme = url.partition("://")[0]
    extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(scheme)
    return UserError(
        f"{scheme}:// URLs cannot be opened: {plain_error(error)}",
        where=url,
        do=pip_install(extra)
        if extra
        else f"correct the URL, or install the package with which fsspec reads {scheme}://",
    )


class UrlFolder:
    """A folder at a URL.

    Args:
        url: of `urls.check_url`.

    Attributes:
        cancelled: ends the repetition of failed transfers when it is set.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.cancelled = threading.Event()

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system and the folder's path in it."""
        import fsspec

        if (folder := local_folder(self.url)) is not None:
            return fsspec.filesystem("file", auto_mkdir=True), str(folder)
        try:
            # Listings and sizes must be the server's present ones.
            return fsspec.core.url_to_fs(self.url, use_listings_cache=False)  # type: ignore[return-value]
        except (ImportError, ValueError) as error:
            raise _scheme_error(self.url, error) from None

    def where(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._opened[1].rstrip('/')}/{name}"

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in the folder, by name, from one paged listing.

        Raises:
            UserError: the URL does not answer, or refuses.
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

        return self._retry(listing, "listing the folder", self.url)

    def check_bucket(self) -> None:
        """Raise a `UserError` if the bucket of an s3:// or gs:// URL does not exist."""
        file_system, root = self._opened

        def look() -> None:
            with suppress(PermissionError):  # who may read objects may not see their bucket
                file_system.info(root.partition("/")[0])

        if self.url.partition("://")[0].lower() in ("s3", "s3a", "gs", "gcs"):
            self._retry(look, "reading the bucket", self.url)

    def size(self, name: str) -> int:
        """Return the size of a file; −1: there is none."""
        return self._retry_or(lambda: self._size(name), "reading", name, -1)

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if there is none."""
        file_system, path = self._opened[0], self._path(name)

        def content() -> bytes:
            file_system.invalidate_cache()
            return bytes(file_system.cat_file(path))

        return self._retry_or(content, "reading", name, None)

    def download(self, name: str, path: Path, size: int | None, sha256: str | None) -> None:
        """Download a file to `path` and compare its size and SHA-256.

        Args:
            size, sha256: those that the file must have; None: any.

        Raises:
            DamagedError: there is no such file, or it has another size or hash.
            UserError: see `sizes`.
        """
        damaged = 0

        def attempt() -> None:
            nonlocal damaged
            try:
                self._opened[0].get_file(self._path(name), str(path))
            except FileNotFoundError:
                raise DamagedError(
                    "the file is missing", where=self.where(name), do=restore_hint(name)
                ) from None
            actual = path.stat().st_size
            if actual != (expected := self._size(name)):
                raise OSError(f"received {actual:,} of {expected:,} bytes")
            if size is not None and actual != size:
                raise damage_error(f"{size} bytes", f"{actual}", self.where(name), name)
            if sha256 is None or (digest := sha256_file(path)) == sha256:
                return
            damaged += 1
            if damaged == DAMAGED_DOWNLOADS:
                raise damage_error(f"SHA-256 {sha256}", digest, self.where(name), name)
            raise OSError(f"received other bytes: SHA-256 {digest}, expected {sha256}")

        self._retry(attempt, "downloading", self.where(name))

    def upload(self, path: Path, name: str) -> None:
        """Upload a file, and verify that the server has its bytes.

        The server's size must be the file's. Then the server's own MD5 of what it stored is
        compared, if it states one (S3 as the ETag, GCS); without an MD5 that agrees the file is
        read back and hashed. (The ETag of an encrypted object is none.)

        Raises:
            UserError: see `sizes`.
        """
        # s3fs reads this option; other file systems have their own.
        options = {"chunksize": PART_BYTES} if _is_s3(self._opened[0]) else {}

        def attempt() -> None:
            if local_folder(self.url) is None:
                self._opened[0].put_file(str(path), self._path(name), **options)
            else:  # which, unlike an object store, would show a file that is half there
                with atomic_path(Path(self._path(name))) as temporary:
                    shutil.copyfile(path, temporary)
            if difference := self._difference(path, name):
                raise OSError(difference)

        self._retry(attempt, "uploading", self.where(name))

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, and verify it as `upload` does."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "content"
            path.write_bytes(content)
            self.upload(path, name)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless there is one; return whether this call has written it.

        Of two calls at the same moment one returns True where the file system has such a write
        (S3, GCS, local folders). Otherwise both may, and one of the contents stays.
        """
        file_system, path = self._opened[0], self._path(name)

        def attempt() -> bool:
            if local_folder(self.url) is not None:  # fsspec's own is not exclusive
                return create_file(Path(path), content)
            try:
                file_system.pipe_file(path, content, mode="create")
            except FileExistsError:  # perhaps of an attempt whose answer was lost
                return bytes(file_system.cat_file(path)) == content
            except (NotImplementedError, ValueError):  # there is no such write
                if file_system.exists(path):
                    return False
                file_system.pipe_file(path, content)
            return True

        return self._retry(attempt, "writing", self.where(name))

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

        if not self._retry_or(is_same, "reading", name, False):
            self.upload(path, name)

    def sha256(self, name: str) -> str | None:
        """Return the hex SHA-256 of a file as it is at the URL; None if there is none."""
        return self._retry_or(lambda: self._sha256_of_object(name), "reading", name, None)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        path = self._path(name)
        self._retry_or(lambda: self._opened[0].rm_file(path), "removing", name, None)

    def _size(self, name: str) -> int:
        file_system = self._opened[0]
        file_system.invalidate_cache()
        return int(file_system.info(self._path(name))["size"])

    def _sha256_of_object(self, name: str) -> str:
        digest, expected, received = hashlib.sha256(), self._size(name), 0
        with self._opened[0].open(self._path(name), "rb", block_size=BLOCK) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                received += len(block)
        if received != expected:
            raise OSError(f"received {received:,} of {expected:,} bytes")
        return digest.hexdigest()

    def _retry_or(self, action: Callable[[], T], doing: str, name: str, absent: A) -> T | A:
        """Return the result of an action on a file, or `absent` if there is no such file."""

        def attempt() -> T | A:
            try:
                return action()
            except FileNotFoundError:
                return absent

        return self._retry(attempt, doing, self.where(name))

    def _retry(self, action: Callable[[], T], doing: str, where: str) -> T:
        return repeat_transfer(action, doing, where, self.cancelled)


def _is_s3(file_system: Any) -> bool:
    protocol = file_system.protocol
    return "s3" in ((protocol,) if isinstance(protocol, str) else protocol)


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
