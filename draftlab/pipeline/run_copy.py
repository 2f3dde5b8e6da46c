"""The copy of a run folder at `run.url`.

Files are copied when their stage is complete, checkpoints while the head is trained
(`checkpoint_copies.py`). On a machine whose run folder lacks them they come from there, and the
stages then go on as if they had run here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from draftlab.errors import UserError
from draftlab.files import atomic_path, read_json, write_json
from draftlab.formatting import size_text
from draftlab.pipeline.copied_run import (
    CHECKPOINTS,
    RUN_FILES,
    STAGE_FILES,
    CopiedFile,
    CopiedRun,
    checkpoint_prefix,
    files_to_copy,
)
from draftlab.pipeline.stage_records import read_record, record_path
from draftlab.pipeline.stages import STAGES
from draftlab.progress import Monitor
from draftlab.store.object_store import UrlFolder
from draftlab.store.transfer_errors import DamagedError
from draftlab.store.url_claim import UrlClaim
from draftlab.store.urls import local_folder
from draftlab.train.checkpoint import MAX_CHECKPOINTS, checkpoints, step_of

ID = "run_url.json"
"""File of the run folder with the id of the run that is at the URL."""


class RunCopy:
    """The copy of a run folder at a URL. The run folder is locked while it is used.

    Args:
        folder: the run folder.
        name: of the run.
        url: of `urls.check_url`.
        monitor: receives lines.

    Raises:
        UserError: the URL is that of the run folder.
    """

    def __init__(self, folder: Path, name: str, url: str, monitor: Monitor) -> None:
        self.folder, self.name, self.monitor = folder, name, monitor
        self.remote, there = UrlFolder(url), local_folder(url)
        if there is not None and folder.resolve() in (there.resolve(), *there.resolve().parents):
            raise UserError(
                f"expected a folder outside of the run folder {folder}, found {url}",
                where="run.url",
                do="name a folder on another disk or in a bucket",
            )
        self._claim, self._is_claimed = UrlClaim(self.remote, folder), False
        self._left_out: set[str] = set()

    def pull(self) -> None:
        """Copy what the run folder lacks of complete stages, and a newer checkpoint, from the URL.

        A stage or checkpoint of which a file is damaged or missing there is left out with a
        warning. A stage is then made again, and so are those that read it.

        Raises:
            UserError: the URL has another run, or does not answer.
        """
        copied = CopiedRun.read(self.remote)
        if copied is None:
            return
        self._check_same_run(copied)
        write_json(self.folder / ID, {"id": copied.id})
        for name in RUN_FILES:
            if name in copied.files.keys() - self._left_out and not (self.folder / name).exists():
                with self._leaving_out([name], name):
                    self._pull_file(copied, name)
        for stage in STAGE_FILES:
            self._pull_stage(copied, stage)
        if self._complete().get("head") is False:
            self._pull_checkpoint(copied)

    def begin(self) -> None:
        """Claim the URL before a stage runs, and copy from there what has been added since.

        Raises:
            UserError: another run works there, or the URL does not answer.
        """
        if former := self._claim.take(self.name):
            self.monitor.say(
                f"run.url: a process ({former}) worked in this run and did not finish; it goes on "
                "here, and that process ends with an error if it still runs"
            )
        self._is_claimed = True
        self.pull()
        copied = CopiedRun.read(self.remote)
        if copied is None:
            copied = CopiedRun(id=self._id() or uuid4().hex, name=self.name)
        files = {n: file for n, file in copied.files.items() if n not in self._left_out}
        self._save(copied.model_copy(update={"files": files}))
        for name in self.remote.names(CHECKPOINTS):
            if name not in files:  # a process was killed while it copied or removed a checkpoint
                self.remote.remove(name)

    def push(self) -> None:
        """Copy what the URL lacks; remove there what is not in the run folder any more.

        Raises:
            UserError: another process has claimed the URL, or the URL does not answer.
        """
        complete, copied = self._complete(), CopiedRun.read(self.remote)
        paths = files_to_copy(self.folder, complete)
        kept = set(paths)
        if copied is not None and "head" in complete:
            kept.update(name for name in copied.files if name.startswith(f"{CHECKPOINTS}/"))
        if copied is None or self._changed(copied, paths) or copied.files.keys() - kept:
            if not self._is_claimed:
                self.begin()
            self._update(paths, kept)

    def push_checkpoint(self, step: int, files: Mapping[str, Path]) -> None:
        """Copy a checkpoint of the training, and remove all but the newest ones there.

        Those of later steps are of an earlier attempt, and go, too.

        Args:
            files: by their names in the checkpoint's folder.

        Raises:
            UserError: as `push`.
        """
        paths = {f"{checkpoint_prefix(step)}{name}": path for name, path in files.items()}
        copied = self._read()
        steps = [one for one in copied.steps() if one < step][-(MAX_CHECKPOINTS - 1) :]
        kept = {name for name in copied.files if not name.startswith(f"{CHECKPOINTS}/")}
        for one in steps:
            kept.update(f"{checkpoint_prefix(one)}{name}" for name in copied.checkpoint(one))
        self._update(paths, kept | paths.keys())

    def stop_retrying(self) -> None:
        """Let a transfer that fails be the last."""
        self.remote.cancelled.set()

    def release(self) -> None:
        """Release the claim when all is copied."""
        if self._is_claimed:
            self._claim.release()

    def _update(self, paths: Mapping[str, Path], kept: Collection[str]) -> None:
        """Upload files that changed, and drop all that are not kept.

        The list never names a file that is not there: a file that is replaced or removed is taken
        off the list before, and a new one is put on it after.
        """
        self._claim.check()
        copied = self._read()
        changed = self._changed(copied, paths)
        dropped = copied.files.keys() - kept
        stays = {n: f for n, f in copied.files.items() if n not in changed.keys() | dropped}
        if changed.keys() & copied.files.keys():
            self._save(copied.model_copy(update={"files": stays}))
        for name in changed:
            self.remote.upload(paths[name], name)
        self._save(copied.model_copy(update={"files": stays | changed}))
        for name in dropped:
            self.remote.remove(name)

    @staticmethod
    def _changed(copied: CopiedRun, paths: Mapping[str, Path]) -> dict[str, CopiedFile]:
        files = {name: CopiedFile.of(path) for name, path in paths.items()}
        return {name: file for name, file in files.items() if copied.files.get(name) != file}

    def _read(self) -> CopiedRun:
        copied = CopiedRun.read(self.remote)
        if copied is None:
            raise UserError(
                "expected the list of the run's files, which somebody has removed meanwhile",
                where=self.remote.url,
                do="run the same command again: all files are then copied",
            )
        return copied

    def _save(self, copied: CopiedRun) -> None:
        self._claim.check()
        write_json(self.folder / ID, {"id": copied.id})
        copied.write(self.remote)

    def _id(self) -> str | None:
        path = self.folder / ID
        return str(read_json(path).get("id")) if path.is_file() else None

    def _complete(self) -> dict[str, bool]:
        """Return for each stage that has begun in the run folder whether it is complete."""
        paths = {name: record_path(self.folder, stage) for name, stage in STAGES.items()}
        return {
            name: bool(read_record(path)["complete"])
            for name, path in paths.items()
            if path.is_file()
        }

    def _check_same_run(self, copied: CopiedRun) -> None:
        own = self._id()
        if copied.name == self.name and (own == copied.id or not (own or self._complete())):
            return
        other = "another run of this name" if copied.name == self.name else f"run {copied.name}"
        raise UserError(
            f"expected an empty folder or the copy of this run, found {other}",
            where=self.remote.url,
            do="name another folder (run.url), or remove that one",
        )

    def _pull_stage(self, copied: CopiedRun, stage: str) -> None:
        """Copy the files of a stage, and its record last, unless it is complete here."""
        path = record_path(self.folder, STAGES[stage])
        name = path.relative_to(self.folder).as_posix()
        if name not in copied.files or (path.is_file() and read_record(path)["complete"]):
            return
        names, record = copied.of_stage(stage), {}
        earlier = record_path(Path(), STAGES[STAGES[stage].after or stage]).as_posix()
        if not self._left_out.isdisjoint([name, *names, earlier]):
            self._left_out.update([name, *names])  # it was made of what is made again
            return
        with self._leaving_out([name, *names], stage), TemporaryDirectory() as temporary:
            self._download(name, Path(temporary) / path.name, copied.files[name])
            record = read_record(Path(temporary) / path.name)
            for one in names if record["complete"] else ():
                self._pull_file(copied, one)
        is_complete = record.get("complete") and name not in self._left_out
        if is_complete:
            size = size_text(sum(copied.files[one].bytes for one in names))
            self.monitor.say(f"{stage}: copied from {self.remote.url} ({size})")
        elif not record or path.is_file() or not (stage == "head" and copied.steps()):
            return  # there is nothing to go on from
        write_json(path, record | {"complete": is_complete})

    @contextmanager
    def _leaving_out(self, names: Collection[str], what: str) -> Iterator[None]:
        """Leave out files of which one turns out to be damaged or missing, with a warning.

        Args:
            what: they are.
        """
        try:
            yield
        except DamagedError as error:
            self._left_out.update(names)
            self.monitor.say(
                f"warning: {what} at {self.remote.url} is not used: {error.what} ({error.where})"
            )

    def _pull_file(self, copied: CopiedRun, name: str) -> None:
        with atomic_path(self.folder / name) as path:
            self._download(name, path, copied.files[name])

    def _pull_checkpoint(self, copied: CopiedRun) -> None:
        """Copy the newest checkpoint that is newer than those of the run folder.

        One that is damaged is left out.
        """
        folder = self.folder / CHECKPOINTS
        newest = max(map(step_of, checkpoints(folder)), default=0)
        for step in reversed([step for step in copied.steps() if step > newest]):
            building, files = folder / f".step-{step:07d}.tmp", copied.checkpoint(step)
            names = {f"{checkpoint_prefix(step)}{name}": name for name in files}
            shutil.rmtree(building, ignore_errors=True)
            (building / "best").mkdir(parents=True)
            if self._left_out.isdisjoint(names):
                with self._leaving_out(names, f"the checkpoint of step {step}"):
                    for full_name, name in names.items():
                        self._download(full_name, building / name, files[name])
            if not self._left_out.isdisjoint(names):
                shutil.rmtree(building)
                continue
            train, best = folder.parent, folder.parent / "best"
            shutil.rmtree(best, ignore_errors=True)
            (building / "best").rename(best)
            if (metrics := building / "metrics.jsonl").is_file():
                os.replace(metrics, train / metrics.name)
            building.rename(folder / f"step-{step:07d}")
            size = size_text(sum(file.bytes for file in files.values()))
            url = self.remote.url
            self.monitor.say(f"train: the checkpoint of step {step} is copied from {url} ({size})")
            return

    def _download(self, name: str, path: Path, file: CopiedFile) -> None:
        self.remote.download(name, path, file.bytes, file.sha256)
