"""Atomic writes, hashes and JSON."""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any

from draftlab.errors import UserError


def cache_folder() -> Path:
    """Return the folder of this machine's cache, which DRAFTLAB_CACHE names."""
    if folder := os.environ.get(CACHE):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftlab"


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys and no spaces, so that equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def sha256_text(text: str) -> str:
    """Return the hex SHA-256 of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


_BLOCK = 1 << 19
"""Bytes that are hashed at a time. Between two blocks a thread waits for Python's lock (GIL)."""


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        block = memoryview(bytearray(min(_BLOCK, os.fstat(file.fileno()).st_size + 1)))
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


FileState = tuple[int, ...]
_known_sha256: dict[FileState, str] = {}
_SETTLED_NS = 100_000_000
"""Age of a change from which a later one has another time: clocks of file systems are coarse."""


def file_state(path: Path) -> FileState:
    """Return device, inode, size and the times of the last changes (mtime, ctime) of a file, one of
    which another content changes. The file is opened, at which NFS asks its server for them.
    """
    with open(path, "rb") as file:
        one = os.fstat(file.fileno())
    return one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns


def known_sha256(path: Path) -> str:
    """Return `sha256_file`, without reading a file that this process has hashed before, or whose
    hash it was told (`remember_sha256`), and whose `file_state` is the same.
    """
    before, started = file_state(path), time.time_ns()
    if (digest := _known_sha256.get(before)) is not None:
        return digest
    digest = sha256_file(path)
    if file_state(path) == before and started - max(before[3:]) > _SETTLED_NS:
        _known_sha256[before] = digest
    return digest


def remember_sha256(path: Path, digest: str) -> None:
    """Let `known_sha256` know the hash of a file that was just written, and set the file's time."""
    now = time.time_ns()
    with suppress(OSError):
        os.utime(path, ns=(now, now))
        state = file_state(path)
        if state[3] == now:  # later changes get a coarser time, and so another one
            _known_sha256[state] = digest


_UMASK = threading.Lock()
CACHE = "DRAFTLAB_CACHE"
_LOCKS_NEEDED = (
    "name a folder on a file system with locks: a local disk, NFS, or Lustre mounted with `flock`; "
    "without them two processes would remove each other's work"
)


@contextmanager
def atomic_path(path: Path, *, writer: str | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success fsync that file and rename it to `path`.

    After a crash `path` holds either the old file or the new one, never a half-written one. What
    is at the temporary path is removed first: it may be a link that leads out of the folder.

    Raises:
        UserError: `path` is a folder.

    Args:
        writer: part of the temporary file's name; None: the number of this process, which
            processes on other machines may have as well.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise UserError(
            "expected a file to replace, or none, found a folder",
            where=path,
            do="remove the folder, or rename it",
        )
    temporary = path.with_name(f".{path.name}.{writer or os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        before = file_state(temporary)
        _use_umask(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
        if digest := _known_sha256.pop(before, None):  # mode and name change ctime alone
            after = file_state(path)
            if after[:-1] == before[:-1]:
                _known_sha256[after] = digest
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def moved_into(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder whose files are moved into `folder` at the end, config.json last.

    A file of that name then shows that all others are there, too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(f".{os.getpid()}.tmp", ".", folder.parent))
    try:
        yield work
        folder.mkdir(exist_ok=True)
        for path in sorted(work.iterdir(), key=lambda path: path.name == "config.json"):
            _use_umask(path)
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty sibling folder, and rename it to `path` on success.

    An older folder at `path` is renamed before and deleted afterwards, so that one of the two is
    complete on disk at any time. What killed processes left is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.old.{os.getpid()}.tmp")
    name = glob.escape(path.name)
    with suppress(OSError):  # perhaps another user's
        remove_leftovers(path.parent, f".{name}.[0-9]*.tmp")
    try:
        remove(temporary)  # of a killed process, which in a container often had the same number
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"the folder cannot be created: {error.strerror}",
            where=path,
            do="name a folder that you can write to, or change its permissions",
        ) from None
    try:
        yield temporary
        if path.exists():
            path.rename(old)
        try:
            temporary.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        _sync_folder(path.parent)
        shutil.rmtree(old, ignore_errors=True)
        with suppress(OSError):
            remove_leftovers(path.parent, f".{name}.old.*.tmp")  # there is a new one now
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_leftovers(folder: Path, pattern: str = ".*.tmp") -> None:
    """Remove the temporary files and folders (`.NAME.PID.tmp`) of processes that were killed.

    A folder that is a link stays as it is: it may lead to what is not draftlab's.
    """
    for path in () if folder.is_symlink() else folder.glob(pattern):
        pid = re.search(r"\.(\d+)(\.tmp)?$", path.name)
        if pid is None or _is_alive(int(pid[1])):
            continue
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def try_lock(descriptor: int, path: Path, *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return whether no other process holds the lock.

    Raises:
        UserError: the file system has no locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"expected a file system with file locks (flock), found one without: {error}",
            where=path,
            do=_LOCKS_NEEDED,
        ) from None
    return True


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a file, which is made if need be; yield whether no other process holds the lock, after
    a `wait` for it.

    The operating system releases the lock when the process dies. The file is opened for writing: an
    exclusive lock over NFS needs that, so a folder cannot be locked. No link is followed.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        yield try_lock(descriptor, path, wait=wait)
    finally:
        os.close(descriptor)


@contextmanager
def only_user(folder: Path, what: str, do: str) -> Iterator[None]:
    """Hold the lock of a folder's file `.lock`, which stays there, until the process dies.

    Raises:
        UserError: another process holds it, which `what` and `do` are about, or the file system's
            locks do not work.
    """
    check_locks(folder)
    with locked(folder / ".lock") as is_free:
        if not is_free:
            raise UserError(what, where=folder, do=do)
        yield


def check_locks(folder: Path) -> None:
    """Check that a lock in a folder keeps a second handle of the file out.

    Raises:
        UserError: it does not, or the file system has no locks.
    """
    # The name is this process's own: processes in containers often have equal numbers.
    descriptor, name = tempfile.mkstemp(f".{os.getpid()}.tmp", ".locks.", folder)
    os.close(descriptor)
    path = Path(name)
    try:
        with locked(path), locked(path) as is_free:
            if is_free:
                raise UserError(
                    "expected file locks (flock) that keep others out, found that two handles of "
                    "one file may lock it at a time",
                    where=folder,
                    do=_LOCKS_NEEDED,
                )
    finally:
        path.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Check that a folder can be written to, before anything is computed for it.

    Raises:
        UserError: `path` is a file or a link that leads nowhere, or the user may not write to it or
            to its nearest existing parent.
    """
    existing = path.absolute()
    while not existing.exists() and not existing.is_symlink():
        existing = existing.parent
    if not existing.exists():
        obstacle = f"a link that leads nowhere, {existing}"
    elif not existing.is_dir():
        obstacle = f"a file, {existing}"
    elif not os.access(existing, os.W_OK | os.X_OK):
        obstacle = f"no permission to write to {existing}"
    else:
        return
    raise UserError(
        f"expected a folder to write to, found {obstacle}", where=path, do="name another folder"
    )


def check_new_folder(path: Path, do: str) -> None:
    """Check that a folder can be written to, and is new or empty; raise a `UserError` otherwise."""
    check_folder(path)
    if path.exists() and any(path.iterdir()):
        raise UserError(
            "expected a new or an empty folder to write to, found one with files", where=path, do=do
        )


def write_text(path: Path, text: str, *, writer: str | None = None) -> None:
    """Write a text file atomically (see `atomic_path`)."""
    with (
        atomic_path(path, writer=writer) as temporary,
        open(temporary, "x", encoding="utf-8") as file,  # which follows no link
    ):
        file.write(text)


def write_json(path: Path, value: Any, *, writer: str | None = None) -> None:
    """Write indented JSON atomically (see `atomic_path`)."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text, writer=writer)


def read_text(
    path: Path,
    *,
    kind: str = "file",
    do: str = "check the path, or repeat the command that writes the file",
) -> str:
    """Return a file's text, which must be UTF-8 (else a UnicodeDecodeError).

    Raises:
        UserError: it is missing, a folder, a device or a pipe, or not readable.
    """
    found = other_kind(path)
    try:
        if not found:
            return path.read_text(encoding="utf-8")
    except OSError as error:
        found = str(error.strerror)
    raise UserError(f"expected a {kind}, found {found}", where=path, do=do)


def other_kind(path: Path) -> str:
    """Return what is at a path instead of a file, or ""; reading a pipe might never end."""
    if path.is_file():
        return ""
    if path.exists():
        return "a folder" if path.is_dir() else "a device or a pipe"
    return "a link that leads nowhere" if path.is_symlink() else "no such file"


MAX_JSON = 1 << 27
"""Bytes that a JSON file may have; a tokenizer.json of 256,000 tokens has 33 million."""


def check_size(path: Path) -> None:
    """Check that a file is not too large to be parsed in memory.

    Raises:
        UserError: it has more than `MAX_JSON` bytes.
    """
    if path.is_file() and (size := path.stat().st_size) > MAX_JSON:
        raise UserError(
            f"expected at most {MAX_JSON:,} bytes, found {size:,}",
            where=path,
            do="fetch the file again from a source that you trust",
        )


def read_json(
    path: Path,
    *,
    kind: str = "JSON file",
    do: str = "restore the file, or repeat the command that wrote it",
) -> Any:
    """Read JSON; raise a `UserError` that calls a missing, broken or huge file a `kind`.

    Args:
        do: what to do about a file that is there and not JSON, or nested too deeply.
    """
    check_size(path)
    try:
        return parse_json(read_text(path, kind=kind))
    except ValueError as error:
        raise UserError(
            f"expected a {kind}, found text that is not JSON: {error}", where=path, do=do
        ) from None


def read_fields(
    path: Path,
    fields: Mapping[str, type | UnionType],
    *,
    kind: str,
    do: str = "restore the file, or repeat the command that wrote it",
) -> dict[str, Any]:
    """Read a JSON object that has some fields of some types, and perhaps others.

    Args:
        do: what to do about a file that is another one.

    Raises:
        UserError: it is missing, not JSON, or has not these fields.
    """
    value = read_json(path, kind=kind, do=do)
    if not isinstance(value, dict):
        found = "other JSON"
    elif wrong := [name for name in fields if not isinstance(value.get(name), fields[name])]:
        found = f"none for {', '.join(wrong)}" if len(wrong) < len(fields) else "other JSON"
    else:
        return value
    raise UserError(f"expected a {kind} with its values, found {found}", where=path, do=do)


MAX_DEPTH = 100
"""Brackets within brackets that JSON may have; what reads it later is recursive."""


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, has numbers of thousands of digits, or is nested too deeply.
    """
    too_deep = f"expected at most {MAX_DEPTH} brackets within each other, found more"
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            part
            for one in level
            if isinstance(one, dict | list)
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not level:
            return value
    raise ValueError(too_deep)


def _use_umask(path: Path) -> None:
    """Give a file the mode of a new one: some writers create files that only their owner reads."""
    try:
        umask = int(Path("/proc/self/status").read_text().partition("\nUmask:")[2].split()[0], 8)
    except (OSError, IndexError):  # elsewhere it can only be read by setting it, for all threads
        with _UMASK:
            umask = os.umask(0)
            os.umask(umask)
    path.chmod(0o666 & ~umask)
