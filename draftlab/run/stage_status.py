"""The status of a run's stages under a recipe: what is done, what has changed, what runs again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from draftlab.errors import UserError
from draftlab.files import known_sha256, remove
from draftlab.formatting import value_text
from draftlab.run.stages import (
    STAGES,
    Stage,
    read_record,
    record_path,
    recorded,
    settings_with_effect,
)
from draftlab.store.object_store import UnreachableError
from draftlab.store.store import DAMAGED_SHARD, check_store

_WRITTEN = (".jsonl", ".json", ".partial.jsonl")
"""Ends of the names of answers, and of prompts that the target wrote."""


@dataclass(frozen=True)
class Status:
    """The state of a stage of a run under a recipe.

    Attributes:
        state: "done"; "unfinished": started with the same inputs, or its files are damaged;
            "missing"; "changed": it has other inputs; "unneeded": not complete, but all that
            reads it is.
        changes: setting → (value in the run, value in the recipe), if the state is "changed".
        missing_input: a file that the stage reads and that does not exist, or "".
        damage: which file of a complete stage has changed since, and how, or "".
        elsewhere: where the shards of a complete store are, if that is not `record.url`, or "".
    """

    stage: Stage
    state: Literal["done", "unfinished", "missing", "changed", "unneeded"]
    changes: dict[str, tuple[Any, Any]]
    missing_input: str = ""
    damage: str = ""
    elsewhere: str = ""

    @property
    def runs(self) -> bool:
        """Return whether the stage has to run."""
        return self.state not in ("done", "unneeded")

    def lines(self, folder: Path) -> list[str]:
        """Return what the console says of the stage before it runs, or why it does not run."""
        name = self.stage.name
        if self.runs and self.damage:
            return [f"{name}: damaged, made again ({self.damage})"]
        if self.runs:
            return [
                f"{name}: {key} was {value_text(former)}, is {value_text(now)}"
                for key, (former, now) in self.changes.items()
            ]
        state = "damaged" if self.damage else "not there"
        state = "elsewhere" if self.elsewhere else state
        state = "there" if self.state == "done" else f"{state}, and not needed"
        detail = self.elsewhere or self.damage or folder / self.stage.artefact
        return [f"{name}: {state} ({detail})"]


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
                    f"{key}: {value_text(in_run)} in the run, {value_text(in_recipe)} now"
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
        """Raise a `UserError` about a damaged store whose shards must not be written again.

        Its manifest, which alone has the hashes of the shards, is damaged, or a shard is; or
        `record.url` has changed.
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
            remove(path)
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
    def recorded_stage(self, stage: Stage, devices: str | None = None) -> Iterator[Path]:
        """Record a stage as started, yield its artefact's path, record it as complete.

        Args:
            devices: of its one process; None: several do it, or it is unknown.
        """
        record = record_path(self.folder, stage)
        try:
            fields = {"url": self.settings.get("record.url")} if stage.name == "store" else {}
            fields["devices"] = devices
            with recorded(self.folder, stage, self.inputs(stage), **fields):
                yield self.folder / stage.artefact
        except UserError:
            # A stage that wrote nothing yet may start again with other settings.
            if not any(path.is_file() or any(path.glob("*")) for path in self._paths(stage)):
                record.unlink(missing_ok=True)
            raise
