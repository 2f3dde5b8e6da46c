"""The books of a recording: its plan, who works on which shard, and which shards are committed.

The manifest's plan decides the shards. A shard is committed when its receipt, a small JSON file
that names the plan and the shard's checksum, lies beside it. Any number of processes may work on
one plan: each takes the next shard whose claim nobody holds, and the system drops the claims of a
process that dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftlab.errors import UserError
from draftlab.files import canonical_json, read_json, sha256_text, write_json
from draftlab.progress import Monitor
from draftlab.store.manifest import MANIFEST, Manifest, Shard
from draftlab.store.plan import refuse_other_plan

_BLANK: dict[str, Any] = {"bytes": None, "sha256": None, "not_finite": {}, "fp8_errors": []}
"""What a plan does not know of a shard, and its receipt does."""


@contextmanager
def locked(folder: Path, *, shared: bool) -> Iterator[None]:
    """Keeps recordings out that do not share the work; the system drops the lock on death.

    Raises:
        UserError: another process records into this folder, and one of the two does not share.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another process is recording into this store",
                where=folder,
                do="wait for it, or have several share the work (draftlab record --join)",
            ) from None
        yield
    finally:
        os.close(handle)


class Receipts:
    """Which shards of a plan are committed.

    Args:
        folder: the store's.
        plan: the manifest of an unfinished store.
    """

    def __init__(self, folder: Path, plan: Manifest) -> None:
        self.folder, self.plan = folder, plan
        self.key = sha256_text(canonical_json(plan.dump()))
        self._published: tuple[int, int] | None = None

    @classmethod
    def of_published(cls, folder: Path) -> Receipts | None:
        """Those of the plan that another process has written; None: the store is complete."""
        published = _stamp(folder)
        found = Manifest.read(folder / MANIFEST)
        if found.complete:
            return None
        receipts = cls(folder, found)
        receipts._published = published
        return receipts

    def publish(self) -> None:
        """Writes the plan, for helpers and for whoever resumes it.

        One that is there already stays as it is: helpers of an earlier leader work on it.
        """
        path = self.folder / MANIFEST
        if not path.exists() or Manifest.read(path) != self.plan:
            write_json(path, self.plan.dump())
        self._published = _stamp(self.folder)

    def path(self, shard: Shard) -> Path:
        """Where a shard's receipt lies."""
        return (self.folder / shard.file).with_suffix(".json")

    def _claim(self, shard: Shard) -> Path:
        return self.folder / f".{shard.file}.claim"

    def write(self, shard: Shard, fields: dict[str, Any]) -> None:
        """Commits a shard; `fields` are those that the plan leaves blank."""
        write_json(self.path(shard), {"plan": self.key, **_BLANK, **fields})

    def scratch(self, shard: Shard) -> Path:
        """A folder to write a shard in: safetensors leaves files of random names when killed."""
        return self.folder / f".{shard.file}.writing"

    def committed(self, shard: Shard) -> bool:
        """Whether a shard of this plan is whole, by its receipt and its size."""
        receipt = self.path(shard)
        if not receipt.is_file():
            return False
        fields = read_json(receipt, kind="shard's receipt")
        if fields.get("plan") != self.key:
            return False
        return shard.model_copy(update={"bytes": fields["bytes"]}).problem(self.folder) is None

    def take(self, shard: Shard, *, wait: bool) -> int | None:
        """Claims a shard that is not committed, and removes what a killed attempt left of it.

        Args:
            wait: for another process that holds it to commit it or to die.

        Returns:
            A handle that holds the claim until it is closed; None: another process holds it, or it
            is committed.
        """
        handle = os.open(self._claim(shard), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(handle)
            return None
        # Another process may have completed the store and removed receipts; its manifest is new.
        over = _stamp(self.folder) != self._published
        if over and Manifest.read(self.folder / MANIFEST).complete:
            self._claim(shard).unlink(missing_ok=True)  # it removed them all; this one came after
        if over or self.committed(shard):
            os.close(handle)
            return None
        self.path(shard).unlink(missing_ok=True)  # of an earlier life: it must not vouch for this
        self._tidy(Path(shard.file).stem)
        shutil.rmtree(self.scratch(shard), ignore_errors=True)
        return handle

    def completed(self) -> Manifest:
        """The plan with what the receipts know of every shard."""
        shards = []
        for shard in self.plan.shards:
            receipt = read_json(self.path(shard), kind="shard's receipt")
            known = {name: receipt[name] for name in _BLANK}
            shards.append(Shard.model_validate(shard.model_dump() | known))
        return self.plan.model_copy(update={"complete": True, "shards": shards})

    def complete(self) -> None:
        """Writes the manifest of the whole store."""
        write_json(self.folder / MANIFEST, self.completed().dump())

    def clear(self) -> None:
        """Removes receipts and claims, when the store is complete."""
        for shard in self.plan.shards:
            self.path(shard).unlink(missing_ok=True)
            self._claim(shard).unlink(missing_ok=True)
        self._tidy("shard-*")  # who was killed while it adopted a store had claimed nothing

    def _tidy(self, stem: str) -> None:
        """Removes what killed processes left of the receipts of shards of such a name."""
        for leftover in self.folder.glob(f".{stem}.*.tmp"):
            leftover.unlink(missing_ok=True)


def _stamp(folder: Path) -> tuple[int, int]:
    """Which writing of the manifest lies in a folder."""
    found = (folder / MANIFEST).stat()
    return found.st_ino, found.st_mtime_ns


def adopt(folder: Path, plan: Manifest, monitor: Monitor) -> Manifest:
    """The plan to follow: the folder's own when it has one, for the batches it was begun with.

    A complete store whose shards are all there is returned as it is. One that lost shards is taken
    back to its plan and the receipts of the good ones.

    Raises:
        UserError: the folder holds a recording of something else.
    """
    for leftover in folder.glob(f".{MANIFEST}.*.tmp"):
        leftover.unlink()
    path = folder / MANIFEST
    if not path.exists():
        return plan
    found = Manifest.read(path)
    refuse_other_plan(found, plan, folder)
    problems = {shard.file: shard.problem(folder) for shard in found.shards}
    if not found.complete or not any(problems.values()):
        return found
    blank = [shard.model_copy(update=_BLANK) for shard in found.shards]
    receipts = Receipts(folder, found.model_copy(update={"complete": False, "shards": blank}))
    for shard in found.shards:
        if problems[shard.file]:
            monitor.say(f"{shard.file}: {problems[shard.file]}; it is recorded again")
        else:
            receipts.write(shard, {name: getattr(shard, name) for name in _BLANK})
    return receipts.plan
