"""A bounded folder of downloaded files, which all processes of this machine share.

A file's name is its SHA-256, so a shard that several stores have is downloaded once. Of files that
must go, the one that was used longest ago goes first. A process may have mapped it: on Linux its
memory stays valid, and the file system frees the space when the process lets go.

    shards/SHA256                 a file whose hash was checked
    shards/SHA256.SIZE.ID.part    a download of so many bytes; its process holds a lock on it
    locks/00 … ff                 who downloads a file holds the lock of its first two digits
    .lock                         held while room is made
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from uuid import uuid4

from draftlab.errors import UserError
from draftlab.files import CACHE, cache_folder, check_locks, locked, sha256_file, try_lock
from draftlab.formatting import parse_size, size_text

SIZE = "DRAFTLAB_CACHE_SIZE"
"""Environment variable with the largest size of the shards in the cache."""
DEFAULT_SIZE = "20GB"
CHECKED_NS = 946_684_800 * 10**9
"""Time of the last change of files whose hash was checked: 2000-01-01. Whoever changes a file
changes this time, too, and the file is hashed again."""
_PART = re.compile(r"[0-9a-f]{64}\.(\d+)\.[0-9a-f]{32}\.part")
_POLL_S = 0.05
_LEFT_S = 24 * 3600
"""Age from which a new file belongs to a process that was killed, in seconds."""


@cache
def machine_cache() -> ShardCache:
    """Return the cache of this machine, as the environment has it; raise a `UserError` if the
    size is none, or the folder has no file locks.
    """
    size = os.environ.get(SIZE) or DEFAULT_SIZE
    try:
        max_bytes = parse_size(size)
    except ValueError as error:
        raise UserError(str(error), where=SIZE, do=f"set {SIZE} to a size such as 200GB") from None
    return ShardCache(cache_folder(), max_bytes)


class ShardCache:
    """A folder of files by their SHA-256, on a local disk with file locks.

    `max_bytes` bounds all files in it, downloads that have begun among them.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._shards, self._locks = folder / "shards", folder / "locks"
        for path in (self._shards, self._locks):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_locks(self._locks)

    def __contains__(self, sha256: str) -> bool:
        return (self._shards / sha256).exists()

    @contextmanager
    def file(
        self, sha256: str, size: int, download: Callable[[Path], None], where: str
    ) -> Iterator[Path]:
        """Yield the path of a file of `size` bytes, which stays there while the context is open.

        Without it `download` writes it to a path, and checks its size and hash. Raises a
        `UserError` about `where` if it is larger than the cache or the disk; or as `download`.
        """
        while True:
            if (descriptor := self._pin(sha256, size)) is not None:
                try:
                    yield self._shards / sha256
                finally:
                    os.close(descriptor)
                return
            with locked(self._locks / sha256[:2], wait=True):
                if sha256 not in self:
                    self._download(sha256, size, download, where)

    def add(self, path: Path, sha256: str) -> None:
        """Move a file with this hash into the cache, if it is not too large for it."""
        size = path.stat().st_size
        if size > self.max_bytes:
            return
        with locked(self._locks / sha256[:2], wait=True), self._reserved(sha256, size) as part:
            self._commit(path, part, sha256)

    @contextmanager
    def temporary(self) -> Iterator[Path]:
        """Yield the path of a new file outside of the bound, which is removed at the end."""
        for left in self.folder.glob("new.*.tmp"):
            with suppress(FileNotFoundError):  # of processes that were killed
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.unlink()
        path = self.folder / f"new.{uuid4().hex}.tmp"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _pin(self, sha256: str, size: int) -> int | None:
        """Return a descriptor that keeps a file from being removed; None: it is not there."""
        path = self._shards / sha256
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        stat = os.fstat(descriptor)
        if stat.st_nlink:
            is_checked = stat.st_mtime_ns == CHECKED_NS
            if stat.st_size == size and (is_checked or sha256_file(path) == sha256):
                os.utime(descriptor, ns=(time.time_ns(), CHECKED_NS))
                return descriptor
            path.unlink(missing_ok=True)  # it was changed; it is downloaded again
        os.close(descriptor)
        return None

    def _download(
        self, sha256: str, size: int, download: Callable[[Path], None], where: str
    ) -> None:
        if size > self.max_bytes:
            raise UserError(
                f"expected a cache that holds a shard of {size_text(size)}, found one of "
                f"{size_text(self.max_bytes)}",
                where=where,
                do=f"set {SIZE} to a larger size, or record smaller shards (record.shard_tokens)",
            )
        with self._reserved(sha256, size) as part:
            try:
                download(part)
                self._commit(part, part, sha256)
            except OSError as error:
                raise UserError(
                    f"the cache cannot be written: {error}",
                    where=self.folder,
                    do=f"free disk space, or set {CACHE} to a folder on another disk",
                ) from None

    def _commit(self, path: Path, part: Path, sha256: str) -> None:
        """Give a file its name in place of the download that had reserved its room."""
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # a name must not outlive a power cut without its bytes
        with locked(self.folder / ".lock", wait=True):  # others count files
            os.replace(path, part)
            # Not before: `temporary` of another thread would remove so old a file.
            os.utime(part, ns=(time.time_ns(), CHECKED_NS))
            os.replace(part, self._shards / sha256)

    @contextmanager
    def _reserved(self, sha256: str, size: int) -> Iterator[Path]:
        """Make room, and yield the path of an empty file to download to."""
        part = self._shards / f"{sha256}.{size}.{uuid4().hex}.part"
        while (descriptor := self._reserve(part, size)) is None:
            time.sleep(_POLL_S)  # the files in the way are read or downloaded just now
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)
            os.close(descriptor)

    def _reserve(self, part: Path, size: int) -> int | None:
        """Return the locked descriptor of a new file; None if there is no room yet."""
        with locked(self.folder / ".lock", wait=True):
            entries = sorted(self._entries())
            free = self.max_bytes - sum(taken for _, taken, _ in entries)
            for _, taken, path in entries:
                is_dead = path.suffix == ".part"
                if (is_dead or free < size) and self._remove_unused(path):
                    free += taken
            if free < size:
                return None
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return descriptor

    def _entries(self) -> Iterator[tuple[int, int, Path]]:
        """Yield the time of the last use (ns), the size and the path of each file."""
        for entry in os.scandir(self._shards):
            with suppress(FileNotFoundError):
                stat, part = entry.stat(follow_symlinks=False), _PART.fullmatch(entry.name)
                size = int(part[1]) if part else stat.st_size
                yield stat.st_atime_ns, size, Path(entry.path)

    @staticmethod
    def _remove_unused(path: Path) -> bool:
        """Remove a file that no process holds; return whether it is gone."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return not path.exists()
        try:
            if is_free := try_lock(descriptor, path):
                path.unlink(missing_ok=True)
            return is_free
        finally:
            os.close(descriptor)
