"""The files of a store's shards: in a local folder, or at a URL with a cache on this machine.

The rest of a store (manifest, index, table, receipts, lock) is in a local or shared folder. A URL
gets copies of manifest, index and table, so that it is a store by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftlab.errors import UserError
from draftlab.files import atomic_path, known_sha256, read_fields
from draftlab.store.manifest import MANIFEST, Manifest, StoreIdentity
from draftlab.store.object_store import UrlClaim, UrlFolder
from draftlab.store.record_index import RECORDS
from draftlab.store.shard import NO_TIME, SHARDS, Listing, Shard, list_shards, shard_number
from draftlab.store.shard_cache import ShardCache, machine_cache
from draftlab.store.urls import check_url, is_url

METADATA = (RECORDS, SHARDS, MANIFEST)
"""Files of a store beside its shards, in the order in which they are written."""
_FETCHES_AT_ONCE = 8
"""Shards that a process downloads ahead at the same time."""
_KEPT_S = 7 * 24 * 3600
"""Time after its last use for which the copy of a URL's manifest is kept, in seconds."""


class ShardFiles:
    """The files of a store's shards, in its folder.

    Attributes:
        address: their folder or URL.
        is_local: whether the files are in a folder; otherwise each is downloaded, and its hash
            checked, before it is read.
    """

    address: Path | str
    is_local = True

    def __init__(self, folder: Path) -> None:
        self.folder = self.address = folder

    def where(self, name: str) -> Path | str:
        """Return the path or URL of a file."""
        return self.folder / name

    def list(self) -> Listing:
        """List the files of all shards at once; raise a `UserError` if the URL does not answer,
        or a symbolic link leads out of the folder.
        """
        return list_shards(self.folder)

    def size(self, shard: Shard) -> int:
        """Return the size of a shard's file; −1: there is none."""
        path = shard.path(self.folder)
        return path.stat().st_size if path.is_file() else -1

    def local_file(self, shard: Shard) -> AbstractContextManager[Path]:
        """Return a context with the path of a shard's file on this machine; who maps it may read
        on.

        Raises a `UserError` if it is damaged or missing, or a symbolic link leads out of the
        folder.
        """
        return nullcontext(shard.path(self.folder))

    def write(self, file: str, writer: str, save: Callable[[Path], str]) -> None:
        """Write the file of a shard by `save`, which returns its hex SHA-256 (`writer`: see
        `atomic_path`); a crash leaves the old file or the new one.
        """
        with atomic_path(self.folder / file, writer=writer) as temporary:
            save(temporary)

    def sha256(self, shard: Shard) -> str | None:
        """Return the SHA-256 of a shard's file as it is stored; None: there is none."""
        path = shard.path(self.folder)
        return known_sha256(path) if path.is_file() else None

    def publish(self, folder: Path) -> None:
        """Copy the manifest of a store's folder, and its columns, to the URL of the shards."""

    def claim(self, plan: str) -> str:
        """Claim the place of the shards for a plan (`UrlClaim.take`); a folder has a lock."""
        return ""

    def release(self) -> None:
        """Release the claim at the end of a recording."""

    def cancel(self) -> None:
        """End the repetition of transfers that fail, since their result is not needed any more."""


class RemoteShardFiles(ShardFiles):
    """Shards at a URL of `urls.check_url`. What is read is downloaded whole into the cache (None:
    that of the environment).

    A recording keeps its claim of the URL in the folder of the store; None: none records.
    """

    is_local = False

    def __init__(
        self, url: str, cache: ShardCache | None = None, folder: Path | None = None
    ) -> None:
        self.address, self.remote, self._cache = url, UrlFolder(url), cache
        self._claim = None if folder is None else UrlClaim(self.remote, folder)
        # A reader repeats what `fetch` fails to download, and waits for it until then.
        self._ahead = UrlFolder(url)
        self._ahead.cancelled.set()

    @cached_property
    def cache(self) -> ShardCache:
        """The cache of this machine."""
        return self._cache or machine_cache()

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_FETCHES_AT_ONCE, "fetch")

    def where(self, name: str) -> str:
        return self.remote.where(name)

    def list(self) -> Listing:
        sizes = {shard_number(name): size for name, size in self.remote.sizes().items()}
        return {number: (size, NO_TIME) for number, size in sizes.items() if number >= 0}

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

    def claim(self, plan: str) -> str:
        if self._claim is None:
            raise ValueError("a recording needs the store's folder")
        return self._claim.take(plan)

    def release(self) -> None:
        if self._claim is not None and self._claim.is_held:
            self._claim.release()

    def publish(self, folder: Path) -> None:
        if self._claim is not None and self._claim.is_held:
            self._claim.check()
        for name in METADATA:
            if (folder / name).is_file():
                self.remote.upload_changed(folder / name, name)

    def read_manifest(self) -> bytes | None:
        """Return the content of the manifest at the URL; None: there is none."""
        return self.remote.read(MANIFEST)

    def fetch(self, shards: Iterable[Shard]) -> list[Future[None]]:
        """Begin to download shards that are read soon; return the downloads. Errors are left to
        who reads them, and a cancelled download does not begin.
        """
        missing = [shard for shard in shards if shard.sha256 not in self.cache]
        return [self._pool.submit(self._fetch, shard) for shard in missing]

    def _fetch(self, shard: Shard) -> None:
        with suppress(UserError), self._local_file(shard, self._ahead):
            pass

    def cancel(self) -> None:
        self.remote.cancelled.set()


def map_shard(
    files: ShardFiles, shard: Shard, identity: StoreIdentity, do: str
) -> dict[str, Tensor]:
    """Return the mapped tensors of a shard that holds the manifest's records.

    Shapes, dtypes and offsets are compared, and token ids and answer spans are read: an id outside
    the vocabulary would read beyond a table's end on a GPU.

    Args:
        do: what a user does about a damaged shard.

    Raises:
        UserError: the file is corrupt or of another store, or there is no memory to map it.
    """
    path = files.where(shard.file)
    try:
        with files.local_file(shard) as local:
            file = safe_open(local, "pt")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, MemoryError, RuntimeError) as error:
        if "Cannot allocate memory" in str(error):
            raise UserError(
                f"the system has no memory to map a shard: {error}",
                where=path,
                do="raise the limits of address space (ulimit -v) and of mapped files (sysctl "
                "vm.max_map_count), or run fewer processes; the store is whole",
            ) from None
        raise UserError(f"the shard is truncated or corrupt: {error}", where=path, do=do) from None
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    planned = identity.tensors(shard.records, shard.tokens)
    expected = {name: shape for name, (_, shape) in planned.items()}
    offsets = [0, *itertools.accumulate(shard.lengths)]
    if shapes != expected or tensors["offsets"].tolist() != offsets:
        raise UserError(
            "the shard does not hold the manifest's records: it belongs to another store or is "
            f"corrupt (expected {expected}, found {shapes})",
            where=path,
            do=do,
        )
    if fault := _fault(tensors, identity):
        raise UserError(f"the shard is corrupt: {fault}", where=path, do=do)
    return tensors


def _fault(tensors: dict[str, Tensor], identity: StoreIdentity) -> str | None:
    """Return the first dtype or value that a shard of this format cannot have; None without any."""
    for name, (dtype, _) in identity.tensors(0, 0).items():
        if tensors[name].dtype != dtype:
            return f"{name}: expected {dtype}, found {tensors[name].dtype}"
    last_id = identity.vocab_size - 1
    # The argmax is -1 where no head learns from the distribution.
    bounds = {"tokens": (0, last_id), "argmax": (-1, last_id), "spans": (0, len(tensors["spans"]))}
    for name, (lowest, highest) in bounds.items():
        if not len(tensors[name]):
            continue
        smallest, largest = (int(value) for value in tensors[name].aminmax())
        if smallest < lowest or largest > highest:
            return f"{name}: expected {lowest} to {highest}, found {smallest} to {largest}"
    return None


def open_shard_files(folder: Path, url: str | None) -> ShardFiles:
    """Return the files of the shards of a store's folder, which are at `url` (`record.url`), or
    in it.
    """
    return ShardFiles(folder) if url is None else RemoteShardFiles(url, folder=folder)


def locate_store(address: Path | str, url: str | None) -> tuple[Path, ShardFiles]:
    """Return the local folder of a store's manifest, and the files of its shards, which are at
    `url`, or in the folder.

    The manifest at an address that is a URL is copied to the machine's cache, with its columns,
    into a folder whose name is the SHA-256 of the manifest, which has the hashes of the columns.
    Raises a `UserError` if the address is none, there is no store, its files do not fit each other,
    or the URL does not answer.
    """
    if not is_url(str(address)):
        return Path(address), open_shard_files(Path(address), url)
    try:
        files = RemoteShardFiles(check_url(str(address)))
    except ValueError as error:
        raise UserError(str(error), do="name a store's folder or URL") from None
    content = files.read_manifest()
    if content is None:
        files.remote.check_bucket()
        raise UserError(
            "expected a store, found no manifest.json",
            where=files.where(MANIFEST),
            do="check the URL; a recording copies its manifest there at its beginning and its end",
        )
    copies = files.cache.folder / "manifests"
    copies.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in copies.iterdir():
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                shutil.rmtree(path, ignore_errors=True)
    copy = copies / hashlib.sha256(content).hexdigest()
    if not copy.is_dir():
        with tempfile.TemporaryDirectory(prefix="new.", dir=copies) as new:
            read_copy(files, content, Path(new))
            with suppress(OSError):  # another process was faster
                os.rename(new, copy)
                Path(new).mkdir()  # for the context to remove
    os.utime(copy)
    return copy, files


def read_copy(files: RemoteShardFiles, content: bytes, folder: Path) -> Manifest:
    """Copy a manifest and its columns to an empty folder, and return it after its hashes are
    checked; a `UserError` about them names the URL.
    """
    try:
        (folder / MANIFEST).write_bytes(content)
        fields = read_fields(folder / MANIFEST, {}, kind="store's manifest.json")
        for name in (RECORDS, SHARDS):
            key = f"{name.partition('.')[0]}_sha256"  # the manifest has the hash of what it needs
            if digest := fields.get(key):
                files.remote.download(name, folder / name, None, digest)
        return Manifest.read(folder / MANIFEST)
    except OSError as error:
        raise UserError(
            f"the manifest cannot be copied to this machine: {error}",
            where=folder,
            do="free disk space",
        ) from None
    except UserError as error:
        if Path(error.where).parent != folder:
            raise
        where = files.where(Path(error.where).name)
        raise UserError(error.what, where=where, do=error.do) from None
