"""The run folder: which stages are complete, which inputs they had, and `runs/latest`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from draftlab.errors import UserError
from draftlab.files import (
    check_folder,
    check_locks,
    known_sha256,
    locked,
    remove_leftovers,
    write_text,
)
from draftlab.recipe.recipe import LATEST
from draftlab.run.stages import (
    STAGES,
    Stage,
    Status,
    read_record,
    record_path,
    recorded,
    settings_with_effect,
)
from draftlab.store.object_store import UnreachableError
from draftlab.store.store import DAMAGED_SHARD, check_store

RUNS = Path("runs")
_WRITTEN = (".jsonl", ".json", ".partial.jsonl")
"""Ends of the names of answers, and of prompts that the target wrote."""


class Run:
    """A run folder, and the inputs of its stages under a recipe: every setting by dotted name, and
    content hashes of input files by stage.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], files: dict[str, dict[str, str]]
    ) -> None:
        self.folder, self.settings, self.files = folder, settings, files

    def inputs(self, stage: Stage) -> dict[str, Any]:
        """Return all that decides a stage's result, including the inputs of earlier stages."""
        earlier = self.inputs(STAGES[stage.after]) if stage.after else {}
        prefixes = stage.settings
        if self.settings.get("record.window") is not None:
            prefixes += stage.with_window
        settings = {
            key: value
            for key, value in self.settings.items()
            if any(key == p or key.startswith(p + ".") for p in prefixes)
        }
        return earlier | settings_with_effect(settings) | self.files.get(stage.name, {})

    def status(self, stage: Stage) -> Status:
        """Return whether a stage's artefact exists, is complete and has the recipe's inputs."""
        path, artefact = record_path(self.folder, stage), self.folder / stage.artefact
        if not path.exists():
            return Status(stage, "missing", {})
        record, inputs = read_record(path), self.inputs(stage)
        former = record["inputs"]
        changes = {
            key: (former.get(key), inputs.get(key))
            for key in sorted(former.keys() | inputs.keys())
            if former.get(key) != inputs.get(key)
        }
        if changes:
            return Status(stage, "changed", changes)
        if not record["complete"]:
            return Status(stage, "unfinished", {})
        if not artefact.exists():
            return Status(stage, "missing", {})
        damage = self._damage(stage, record)
        if not damage:
            return Status(stage, "done", {})
        url, former, elsewhere = self.settings.get("record.url"), record.get("url"), ""
        if stage.name == "store" and former != url:
            place = f"at {former}" if former else f"in {artefact}"
            elsewhere = f"its shards are {place}, and record.url is {url or 'not set'}"
        return Status(stage, "unfinished", {}, damage=damage, elsewhere=elsewhere)

    def _damage(self, stage: Stage, record: dict[str, Any]) -> str:
        """Return what has changed in the files of a complete stage, or ""."""
        files = [f"{stage.artefact}/{name}" for name in stage.files]
        for name, digest in (dict.fromkeys(files) | record.get("sha256", {})).items():
            if not (self.folder / name).is_file():
                return f"{name} is missing"
            if digest and (actual := known_sha256(self.folder / name)) != digest:
                return f"{name} has SHA-256 {actual[:12]}, and {digest[:12]} when it was written"
        if stage.name == "store":
            store, url = self.folder / stage.artefact, self.settings.get("record.url")
            written = record_path(self.folder, stage)
            try:
                if check_store(store, url, written.stat().st_mtime_ns):
                    # What has the right hash is not hashed again.
                    with suppress(OSError):  # of another user
                        os.utime(written, follow_symlinks=False)
            except UnreachableError:  # nothing is known of the shards
                raise
            except UserError as error:  # a shard is missing or truncated
                return f"{Path(error.where).name}: {error.what}"
        return ""

    def plan(self, *last: str) -> list[Status]:
        """Return the states of the stages up to those named `last`, in order."""
        names = {stage.name for name in last for stage in self.stages_up_to(name)}
        statuses = {n: self.status(stage) for n, stage in STAGES.items() if n in names}
        needed = set(last)
        for name, status in reversed(statuses.items()):
            if name in needed and status.state != "done" and status.stage.after:
                needed.add(status.stage.after)
        return [
            replace(status, state="unneeded")
            if name not in needed and status.state in ("missing", "unfinished")
            else status
            for name, status in statuses.items()
        ]

    def stages_up_to(self, last: str) -> list[Stage]:
        """Return the stages up to and including `last`, in order."""
        stage = STAGES[last]
        return [*(self.stages_up_to(stage.after) if stage.after else ()), stage]

    def refuse_changes(self, statuses: list[Status]) -> None:
        """Raise a `UserError` that names the changed settings, unless only cheap stages changed."""
        for status in statuses:
            stage = status.stage
            if status.state == "changed" and not stage.cheap:
                lines = [
                    f"{key}: {in_run!r} in the run, {in_recipe!r} now"
                    for key, (in_run, in_recipe) in status.changes.items()
                ]
                kept = ""
                if "prompts.max_prompts" in status.changes:
                    kept = "; answers and states are not reused for another number of prompts"
                raise UserError(
                    f"the stage {stage.name!r} of the run has other settings:\n  "
                    + "\n  ".join(lines),
                    where=self.folder,
                    do=f"--force runs {stage.name} and all later stages again; name=other starts a "
                    f"new run beside this one{kept}",
                )

    def check_store(self, status: Status) -> None:
        """Check that a damaged stage is no store whose shards were written and must not be again.

        Raises:
            UserError: its manifest, which alone has the hashes of the shards, is damaged, or a
                shard is; or `record.url` has changed.
        """
        shard, _, damage = status.damage.partition(": ")
        if damage.startswith(DAMAGED_SHARD):
            recipe = quote(str(self.folder / "recipe.yaml"))
            raise UserError(
                damage,
                where=self.folder / status.stage.artefact / shard,
                do=f"remove this shard; `draftlab record {recipe}` makes it again",
            )
        if status.elsewhere:
            raise UserError(
                f"the store is complete, but {status.elsewhere}: {status.damage}",
                where="record.url",
                do="set it as it was, or copy the shards to the new place first; to record them "
                f"again there, remove {self.folder / status.stage.artefact}",
            )
        if status.damage.startswith(STAGES["store"].hashed):
            raise UserError(
                f"expected the store's manifest as it was written: {status.damage}",
                where=self.folder / STAGES["store"].hashed,
                do=f"restore the file, or remove {self.folder / status.stage.artefact}: the same "
                "command then records it again",
            )

    def remove(self, stage: Stage) -> None:
        """Delete a stage's record and artefact, after those of all later stages."""
        # In this order a crash leaves no stage without the stages that it was computed from.
        for other in STAGES.values():
            if other.after == stage.name:
                self.remove(other)
        for path in self._paths(stage):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        record_path(self.folder, stage).unlink(missing_ok=True)

    def _paths(self, stage: Stage) -> set[Path]:
        """Return the paths of a stage's artefact and of its unfinished work."""
        paths = {self.folder / stage.artefact}
        if stage.name == "head":
            paths.add(self.folder / "train")
        if stage.name == "answers":
            for name in ("answers", "prompts"):  # prompts that the target wrote
                paths |= {self.folder / f"{name}{end}" for end in _WRITTEN}
            paths.add(self.folder / "answers.index")
            for name in ("jsonl", "json", "index"):
                paths.update(self.folder.glob(f".answers.{name}.*tmp"))
        return paths

    @contextmanager
    def recorded_stage(self, stage: Stage) -> Iterator[Path]:
        """Record a stage as started, yield its artefact's path, record it as complete."""
        record = record_path(self.folder, stage)
        try:
            fields = {"url": self.settings.get("record.url")} if stage.name == "store" else {}
            with recorded(self.folder, stage, self.inputs(stage), **fields):
                yield self.folder / stage.artefact
        except UserError:
            # A stage that wrote nothing yet may start again with other settings.
            if not any(path.is_file() or any(path.glob("*")) for path in self._paths(stage)):
                record.unlink(missing_ok=True)
            raise

    def write_recipe(self, recipe: str) -> str | None:
        """Write recipe.yaml and point runs/latest at this run, where they differ; return a remark
        if runs/latest is no link, which stays as it is.
        """
        path, link = self.folder / "recipe.yaml", self.folder.parent / LATEST
        if not path.exists() or path.read_text(encoding="utf-8") != recipe:
            write_text(path, recipe)
        if link.exists() and not link.is_symlink():
            return f"{link} is not a link and stays: name the run for later commands"
        if not (link.is_symlink() and os.readlink(link) == self.folder.name):
            remove_leftovers(link.parent, f".{LATEST}.*")
            temporary = link.with_name(f".{LATEST}.{os.getpid()}.tmp")
            temporary.symlink_to(self.folder.name)
            os.replace(temporary, link)
        return None


def check_links(folder: Path) -> None:
    """Raise a `UserError` if a run folder has links, through which a stranger's run would write
    elsewhere.

    Only the store may be one, since it is often on another disk.
    """
    store = folder / STAGES["store"].artefact
    own_links = (store, folder / "train" / "wandb")  # wandb links to its latest run
    for root, folders, files in os.walk(folder):
        for path in (Path(root) / name for name in sorted(folders + files)):
            if path.is_symlink() and path != store:
                raise UserError(
                    f"expected no links in a run folder, found one to {os.readlink(path)}",
                    where=path,
                    do="put what it leads to in its place, if it belongs to the run, or remove it",
                )
        folders[:] = [name for name in folders if Path(root) / name not in own_links]


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Lock a run folder against other processes; raise a `UserError` if one holds the lock, or the
    folder has links (see `check_links`).
    """
    check_folder(folder)
    check_links(folder)
    folder.mkdir(parents=True, exist_ok=True)
    check_locks(folder)
    with locked(folder / ".lock") as is_free:
        if not is_free:
            raise UserError(
                "another draftlab process is working in this run",
                where=folder,
                do="wait until it has finished, or start a run with another name",
            )
        for name in (".", "stages", "train", *(stage.artefact for stage in STAGES.values())):
            if name != STAGES["store"].artefact:  # which `record` looks after
                remove_leftovers(folder / name)
        yield


def find_run(name: str | None) -> Path:
    """Return the folder of a run by name or path (None: of the latest run); raise a `UserError`
    without.
    """
    candidates = [RUNS / LATEST] if name is None else [Path(name), RUNS / name]
    for folder in candidates:
        if (folder / "recipe.yaml").is_file():
            return folder.resolve()
    found = "none" if name is None else f"none named {name!r}"
    if name is not None and (there := [folder for folder in candidates if folder.exists()]):
        found = "a folder without recipe.yaml" if there[0].is_dir() else "a file"
    names = sorted({path.parent.name for path in RUNS.glob("*/recipe.yaml")} - {LATEST})
    raise UserError(
        "there is no run yet" if name is None else f"expected a run, found {found}",
        where=name or RUNS,
        do=f"the runs here are: {', '.join(names)}"
        if names
        else "`draftlab train recipes/quickstart.yaml` makes one",
    )
