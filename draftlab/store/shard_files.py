"""The files of a store's shards: in a local folder, or at a URL with a cache on this machine.

The rest of a store (manifest, index, table, receipts, lock) is in a local or shared folder. A URL
gets copies of manifest, index and table, so that it is a store by itself.
"""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path

from draftlab.errors import UserError
from draftlab.files import atomic_path, sha256_file
from draftlab.store.manifest import MANIFEST, Shard
from draftlab.store.object_store import UrlFolder
from draftlab.store.record_index import RECORDS
from draftlab.store.shard import ShardSizes
from draftlab.store.shard_cache import ShardCache, machine_cache
from draftlab.store.shard_table import SHARDS
from draftlab.store.url_claim import UrlClaim
from draftlab.store.urls import local_folder

METADATA = (RECORDS, SHARDS, MANIFEST)
"""Files of a store beside its shards, in the order in which they are written."""
FETCHES_AT_ONCE = 8
"""Shards that a process downloads ahead at the same time."""


class ShardFiles(ABC):
    """The files of a store's shards.

    Attributes:
        address: their folder or URL.
        is_local: whether the files are in a folder; otherwise each is downloaded, and its hash
            checked, before it is read.
    """

    address: Path | str
    is_local: bool

    @abstractmethod
    def where(self, name: str) -> Path | str:
        """Return the path or URL of a file."""

    @abstractmethod
    def list(self) -> ShardSizes:
        """List the files of all shards at once.

        Raises:
            UserError: the URL does not answer, or a symbolic link leads out of the folder.
        """

    @abstractmethod
    def size(self, shard: Shard) -> int:
        """Return the size of a shard's file; −1: there is none."""

    @abstractmethod
    def local_file(self, shard: Shard) -> AbstractContextManager[Path]:
        """Return a context with the path of a shard's file on this machine.

        Who maps the file in the context may read the memory afterwards.

        Raises:
            UserError: it is damaged or missing; or a symbolic link leads out of the folder.
        """

    @abstractmethod
    def write(self, file: str, writer: str, save: Callable[[Path], str]) -> None:
        """Write the file of a shard; a crash leaves the old file or the new one.

        Args:
            writer: see `atomic_path`.
            save: writes a new file, and returns its hex SHA-256.
        """

    @abstractmethod
    def sha256(self, shard: Shard) -> str | None:
        """Return the SHA-256 of a shard's file as it is stored; None: there is none."""

    @abstractmethod
    def remove(self, file: str) -> None:
        """Remove the file of a shard, if it is there."""

    @abstractmethod
    def publish(self, folder: Path) -> None:
        """Copy the manifest of a store's folder, and its columns, to where the shards are."""

    @abstractmethod
    def read_manifest(self) -> bytes | None:
        """Return the content of the manifest where the shards are; None: there is none."""

    @abstractmethod
    def copy_metadata(self, name: str, path: Path) -> None:
        """Copy the file of an index or table from where the shards are, if it is there."""

    def claim(self, plan: str) -> str:
        """Claim the place of the shards, before they are written.

        Args:
            plan: what identifies the recording.

        Returns:
            Whose unfinished recording of the same plan is continued, or "".

        Raises:
            UserError: another recording has begun there.
        """
        return ""  # a folder has a lock

    def release(self) -> None:  # noqa: B027
        """Release the claim at the end of a recording."""

    def cancel(self) -> None:  # noqa: B027
        """End the repetition of transfers that fail, since their result is not needed any more."""


class LocalShardFiles(ShardFiles):
    """Shards in a folder, which is the store's own or that of a file:// URL."""

    is_local = True

    def __init__(self, folder: Path) -> None:
        self.folder = self.address = folder

    def where(self, name: str) -> Path:
        return self.folder / name

    def list(self) -> ShardSizes:
        return ShardSizes.of(self.folder) if self.folder.is_dir() else ShardSizes.from_files([])

    def size(self, shard: Shard) -> int:
        path = shard.path(self.folder)
        return path.stat().st_size if path.is_file() else -1

    def local_file(self, shard: Shard) -> AbstractContextManager[Path]:
        return nullcontext(shard.path(self.folder))

    def write(self, file: str, writer: str, save: Callable[[Path], str]) -> None:
        with atomic_path(self.folder / file, writer=writer) as temporary:
            save(temporary)

    def sha256(self, shard: Shard) -> str | None:
        path = shard.path(self.folder)
        return sha256_file(path) if path.is_file() else None

    def remove(self, file: str) -> None:
        (self.folder / file).unlink(missing_ok=True)

    def publish(self, folder: Path) -> None:
        if self.folder.resolve() == folder.resolve():
            return
        for name in METADATA:
            if (folder / name).is_file():
                with atomic_path(self.folder / name) as temporary:
                    shutil.copyfile(folder / name, temporary)

    def read_manifest(self) -> bytes | None:
        path = self.folder / MANIFEST
        return path.read_bytes() if path.is_file() else None

    def copy_metadata(self, name: str, path: Path) -> None:
        with suppress(FileNotFoundError):
            shutil.copyfile(self.folder / name, path, follow_symlinks=False)


class RemoteShardFiles(ShardFiles):
    """Shards at a URL. What is read is downloaded whole into the cache of this machine.

    Args:
        url: of `urls.check_url`.
        cache: None: that of the environment.
        folder: of the store, in which a recording keeps its claim of the URL; None: none records.
    """

    is_local = False

    def __init__(
        self, url: str, cache: ShardCache | None = None, folder: Path | None = None
    ) -> None:
        self.address, self.remote, self._cache = url, UrlFolder(url), cache
        self._claim = None if folder is None else UrlClaim(self.remote, folder)
        self._is_claimed = False
        # A reader repeats what `fetch` fails to download, and waits for it until then.
        self._ahead = UrlFolder(url)
        self._ahead.cancelled.set()

    @cached_property
    def cache(self) -> ShardCache:
        """The cache of this machine."""
        return self._cache or machine_cache()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(FETCHES_AT_ONCE, "fetch")

    def where(self, name: str) -> str:
        return self.remote.where(name)

    def list(self) -> ShardSizes:
        return ShardSizes.from_files(self.remote.sizes().items())

    def size(self, shard: Shard) -> int:
        return self.remote.size(shard.file)

    def local_file(self, shard: Shard) -> AbstractContextManager[Path]:
        return self._local_file(shard, self.remote)

    @contextmanager
    def _local_file(self, shard: Shard, remote: UrlFolder) -> Iterator[Path]:
        size, sha256 = shard.bytes, shard.sha256
        if size is None or sha256 is None:
            raise ValueError("only the shards of a complete store are read")

        def download(path: Path) -> None:
            remote.download(shard.file, path, size, sha256)

        with self.cache.file(sha256, size, download, self.where(shard.file)) as path:
            yield path

    def write(self, file: str, writer: str, save: Callable[[Path], str]) -> None:
        with self.cache.temporary() as temporary:
            sha256 = save(temporary)
            if self._claim is not None:
                self._claim.check()
            self.remote.upload(temporary, file)
            self.cache.add(temporary, sha256)  # training reads it

    def sha256(self, shard: Shard) -> str | None:
        return self.remote.sha256(shard.file)

    def remove(self, file: str) -> None:
        self.remote.remove(file)

    def claim(self, plan: str) -> str:
        if self._claim is None:
            raise ValueError("a recording needs the store's folder")
        former, self._is_claimed = self._claim.take(plan), True
        return former

    def release(self) -> None:
        if self._claim is not None and self._is_claimed:
            self._claim.release()
            self._is_claimed = False

    def publish(self, folder: Path) -> None:
        if self._claim is not None and self._is_claimed:
            self._claim.check()
        for name in METADATA:
            if (folder / name).is_file():
                self.remote.upload_changed(folder / name, name)

    def read_manifest(self) -> bytes | None:
        return self.remote.read(MANIFEST)

    def copy_metadata(self, name: str, path: Path) -> None:
        if self.remote.size(name) >= 0:
            self.remote.download(name, path, None, None)

    def fetch(self, shards: Iterable[Shard]) -> list[Future[None]]:
        """Begin to download shards that are read soon. Errors are left to who reads them.

        Returns:
            The downloads; a cancelled one does not begin.
        """
        missing = [shard for shard in shards if shard.sha256 not in self.cache]
        return [self._pool.submit(self._fetch, shard) for shard in missing]

    def _fetch(self, shard: Shard) -> None:
        with suppress(UserError), self._local_file(shard, self._ahead):
            pass

    def cancel(self) -> None:
        self.remote.cancelled.set()


def open_shard_files(folder: Path, url: str | None) -> ShardFiles:
    """Return the files of the shards of a store's folder.

    Args:
        url: where the shards are (`record.url`); None: in the folder.
    """
    if url is None:
        return LocalShardFiles(folder)
    if (elsewhere := local_folder(url)) is not None:
        return LocalShardFiles(elsewhere)
    return RemoteShardFiles(url, folder=folder)
