"""Claims and receipts: who works on which shard of a plan, and which shards are committed.

The plan in the manifest decides the shards. A shard is committed when its receipt, a small JSON
file with the hashes of the plan and of the shard, is next to it. Any number of processes may work
on one plan: each claims the next shard that is neither committed nor claimed. A claim is a file
lock, which the operating system releases when the process dies.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import (
    canonical_json,
    check_locks,
    locked,
    read_json,
    remove_leftovers,
    sha256_text,
    try_lock,
    write_json,
    write_text,
)
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Manifest, Shard
from draftlab.store.record_index import RECORDS
from draftlab.store.recording_plan import check_same_recording

MOUNTS = Path("/proc/self/mounts")
LOCK, HOST = ".lock", ".recording-host"
_BLANK: dict[str, Any] = {"bytes": None, "sha256": None, "not_finite": {}, "fp8_errors": []}
"""Fields of a shard that the plan leaves blank and the receipt has."""


@contextmanager
def lock_folder(folder: Path, *, shared: bool) -> Iterator[None]:
    """Hold the lock of a folder's file `.lock`, which stays there.

    The operating system releases it when the process dies.

    Raises:
        UserError: another process holds the lock, and one of the two does not share it; or the
            file system's locks do not work, or not between machines, and another machine records.
    """
    check_locks(folder)
    with locked(folder / LOCK, shared=shared) as is_free:
        if not is_free:
            raise UserError(
                "another process is recording into this store",
                where=folder,
                do="wait for it, or have several share the work (draftlab record --join)",
            )
        if has_local_locks(folder):
            _check_host(folder)
        yield


def has_local_locks(folder: Path) -> bool:
    """Return whether the mount of a folder keeps file locks to each machine."""
    best, local = "", False
    for line in MOUNTS.read_text().splitlines() if MOUNTS.is_file() else ():
        _, mount, kind, options, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if len(mount) >= len(best) and folder.resolve().is_relative_to(mount):
            named = set(options.split(",")) & {
                "lustre": {"localflock"},
                "nfs": {"nolock", "local_lock=flock", "local_lock=all"},
                "nfs4": {"local_lock=flock", "local_lock=all"},
            }.get(kind, set())
            best, local = mount, bool(named)
    return local


def _check_host(folder: Path) -> None:
    """Note this machine in the folder; raise a `UserError` if another one is noted."""
    path, here = folder / HOST, socket.gethostname()
    if not path.exists():
        write_text(path, here)
    elif (other := path.read_text(encoding="utf-8")) != here:
        raise UserError(
            f"expected to record on {other}, found {here}: file locks of this file system are "
            "local to each machine, so two would remove each other's work",
            where=path,
            do="record on one machine, or mount the file system with locks between machines "
            f"(Lustre: flock); if nothing records on {other} any more, remove this file",
        )


class Receipts:
    """The claims and receipts of a plan's shards.

    Args:
        folder: the store's folder.
        plan: the manifest of an incomplete store.
    """

    def __init__(self, folder: Path, plan: Manifest) -> None:
        self.folder, self.plan = folder, plan
        self.key = sha256_text(canonical_json(plan.dump()))
        self._version: tuple[int, int] | None = None

    @classmethod
    def from_published(cls, folder: Path) -> Receipts | None:
        """Return the receipts of the plan in a folder; None if the store is complete."""
        version = _manifest_version(folder)
        manifest = Manifest.read(folder / MANIFEST)
        if manifest.complete:
            return None
        receipts = cls(folder, manifest)
        receipts._version = version
        return receipts

    def publish(self) -> None:
        """Write the plan, for helpers and for a resumed recording.

        An equal plan is not written again, because helpers of an earlier leader work on it.
        """
        path = self.folder / MANIFEST
        if not path.exists() or Manifest.read(path).dump() != self.plan.dump():
            self.plan.write(self.folder)
        self._version = _manifest_version(self.folder)

    def receipt_path(self, shard: Shard) -> Path:
        """Return the path of a shard's receipt."""
        return (self.folder / shard.file).with_suffix(".json")

    def _claim_path(self, shard: Shard) -> Path:
        return self.folder / f".{shard.file}.claim"

    def commit(self, shard: Shard, fields: dict[str, Any]) -> None:
        """Write a shard's receipt with the fields that the plan leaves blank."""
        receipt = {"plan": self.key, **_BLANK, **fields}
        write_json(self.receipt_path(shard), receipt, exclusive=True)

    def is_committed(self, shard: Shard) -> bool:
        """Return whether a shard has a receipt of this plan and the size in the receipt."""
        receipt = self._read_receipt(shard)
        if receipt is None:
            return False
        return shard.model_copy(update={"bytes": receipt["bytes"]}).problem(self.folder) is None

    def _read_receipt(self, shard: Shard) -> dict[str, Any] | None:
        """Return a shard's receipt of this plan; None if there is none."""
        path = self.receipt_path(shard)
        try:
            receipt: dict[str, Any] = read_json(path, kind="shard's receipt")
        except UserError:
            if path.exists():
                raise
            return None  # other processes may remove it at any time
        return receipt if receipt.get("plan") == self.key else None

    def claim(self, shard: Shard, *, wait: bool) -> int | None:
        """Claim a shard that is not committed, and remove the receipt of an earlier file.

        Args:
            wait: wait until the process that has the claim commits the shard or dies.

        Returns:
            A file descriptor that holds the claim until it is closed; None if another process has
            the claim, or the shard is committed.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        descriptor = os.open(self._claim_path(shard), flags, 0o666)
        if not try_lock(descriptor, self._claim_path(shard), wait=wait):
            os.close(descriptor)
            return None
        # Another process may have completed the store and removed receipts; its manifest is new.
        replaced = _manifest_version(self.folder) != self._version
        if replaced and Manifest.read(self.folder / MANIFEST).complete:
            # That process has removed all claims, and this one was made afterwards.
            self._claim_path(shard).unlink(missing_ok=True)
        if replaced or self.is_committed(shard):
            os.close(descriptor)
            return None
        # It is the receipt of an older file, not of the next one.
        self.receipt_path(shard).unlink(missing_ok=True)
        return descriptor

    def complete(self) -> None:
        """Write the manifest of the complete store, with the fields of all receipts.

        Raises:
            UserError: a shard has no receipt of this plan.
        """
        shards = []
        for shard in self.plan.shards:
            receipt = self._read_receipt(shard)
            if receipt is None:  # a process that works on a former plan has replaced it
                raise UserError(
                    "expected a shard of this recording, found one that another process has "
                    "written or removed since",
                    where=self.folder / shard.file,
                    do="end all other processes that record into this folder, and run the same "
                    "command again: whole shards are kept",
                )
            fields = {name: receipt[name] for name in _BLANK}
            shards.append(shard.committed(fields))
        self.plan.model_copy(update={"complete": True, "shards": shards}).write(self.folder)

    def clear(self) -> None:
        """Remove receipts and claims after the store is complete."""
        for shard in self.plan.shards:
            self.receipt_path(shard).unlink(missing_ok=True)
        (self.folder / HOST).unlink(missing_ok=True)
        remove_leftovers(self.folder, ".locks.*.tmp")  # of `check_locks`
        # Claims, and what killed processes of this and of older versions left.
        for path in self.folder.glob(".shard-*"):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _manifest_version(folder: Path) -> tuple[int, int]:
    """Return a value that changes when the manifest is written again."""
    stat = (folder / MANIFEST).stat()
    return stat.st_ino, stat.st_mtime_ns


def resume_plan(folder: Path, plan: Manifest, monitor: Monitor) -> Manifest:
    """Return the plan to follow: the folder's own if there is one, because of its batches.

    The manifest of a complete store with all its shards is returned unchanged. A complete store
    without some of its shards is turned back into its plan and the receipts of the other shards.

    Raises:
        UserError: the folder holds another recording.
    """
    for path in folder.glob(".*.tmp"):
        if path.name.startswith((f".{MANIFEST}.", f".{RECORDS}.")):
            path.unlink()
    if not (folder / MANIFEST).exists():
        return plan
    if read_json(folder / MANIFEST).get("records_sha256") == plan.records_sha256:
        plan.write_index(folder)  # it may be damaged
    manifest = Manifest.read(folder / MANIFEST)
    check_same_recording(manifest, plan, folder)
    problems = {shard.file: shard.problem(folder) for shard in manifest.shards}
    if not manifest.complete or not any(problems.values()):
        return manifest
    blank = [shard.model_copy(update=_BLANK) for shard in manifest.shards]
    receipts = Receipts(folder, manifest.model_copy(update={"complete": False, "shards": blank}))
    for shard in manifest.shards:
        if problems[shard.file]:
            monitor.say(f"{shard.file}: {problems[shard.file]}; it is recorded again")
        else:
            receipts.commit(shard, {name: getattr(shard, name) for name in _BLANK})
    return receipts.plan
