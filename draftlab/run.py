"""The run folder: what was made from what, which stages fit a recipe, and `runs/latest`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from draftlab.base import UserError, canonical_json, read_json, sha256_text, write_json

RUNS = Path("runs")
LATEST = "latest"


@dataclass(frozen=True)
class Stage:
    """A step of the pipeline.

    Attributes:
        name: also the name of its record in `stages/`.
        after: the stage whose artefact it reads.
        knobs: prefixes of the recipe's knobs that decide what it makes.
        artefact: file or folder in the run folder.
        cheap: made again without asking when a knob changed.
    """

    name: str
    after: str | None
    knobs: tuple[str, ...]
    artefact: str
    cheap: bool = False


STAGES = {
    stage.name: stage
    for stage in (
        Stage("answers", None, ("seed", "target", "prompts", "regenerate"), "answers.jsonl"),
        Stage("store", "answers", ("record",), "store"),
        Stage("head", "store", ("seed", "draft_vocab", "head", "train"), "head"),
        Stage("eval", "head", ("eval",), "eval", cheap=True),
        Stage("export", "head", ("export",), "export", cheap=True),
    )
}
# These change how a stage runs, never what it makes.
_FREE = {"target.device"} | {
    f"train.{knob}"
    for knob in ("device", "checkpoint_every", "log_every", "wandb", "validate_every")
}


@dataclass(frozen=True)
class Status:
    """How a stage of a run stands to a recipe.

    Attributes:
        state: "done", "unfinished" (begun with these inputs), "missing", or "changed".
        changes: knob → (value in the run, value asked for), for "changed".
    """

    stage: Stage
    state: Literal["done", "unfinished", "missing", "changed"]
    changes: dict[str, tuple[Any, Any]]


class Run:
    """A run folder and the inputs its stages would have under a recipe.

    Args:
        folder: runs/<name>.
        knobs: every knob of the recipe by dotted name.
        files: content hashes of input files, by stage.
    """

    def __init__(
        self, folder: Path, knobs: dict[str, Any], files: dict[str, dict[str, str]]
    ) -> None:
        self.folder, self.knobs, self.files = folder, knobs, files

    def inputs(self, stage: Stage) -> dict[str, Any]:
        """All that decides what a stage makes, its predecessors' inputs included."""
        own = {
            key: value
            for key, value in self.knobs.items()
            if key not in _FREE and any(key == p or key.startswith(p + ".") for p in stage.knobs)
        }
        before = self.inputs(STAGES[stage.after]) if stage.after else {}
        return before | own | self.files.get(stage.name, {})

    def key(self, stage: Stage) -> str:
        """Hex SHA-256 of a stage's inputs."""
        return sha256_text(canonical_json(self.inputs(stage)))

    def status(self, stage: Stage) -> Status:
        """Whether a stage's artefact is there and fits."""
        record = self.folder / "stages" / f"{stage.name}.json"
        artefact = self.folder / stage.artefact
        if not record.exists():
            return Status(stage, "missing", {})
        found = read_json(record, kind="stage record")
        inputs = self.inputs(stage)
        # Round-trip through JSON, so that 1.0 and 1 compare as they were written.
        changes = {
            key: (found["inputs"].get(key), inputs.get(key))
            for key in sorted(found["inputs"].keys() | inputs.keys())
            if found["inputs"].get(key) != inputs.get(key)
        }
        if changes:
            return Status(stage, "changed", changes)
        if not artefact.exists():
            return Status(stage, "missing", {})
        return Status(stage, "done" if found["complete"] else "unfinished", {})

    def chain(self, last: str) -> list[Stage]:
        """The stages up to and including `last`, in order."""
        stage: Stage | None = STAGES[last]
        chain = []
        while stage is not None:
            chain.append(stage)
            stage = STAGES[stage.after] if stage.after else None
        return chain[::-1]

    def refuse_changes(self, stages: list[Stage]) -> None:
        """Raises a `UserError` that names the knobs in which the run and the recipe differ."""
        for stage in stages:
            status = self.status(stage)
            if status.state == "changed" and not stage.cheap:
                lines = [
                    f"{key}: {made!r} in the run, {asked!r} now"
                    for key, (made, asked) in status.changes.items()
                ]
                raise UserError(
                    f"the run's stage {stage.name!r} was made with other knobs:\n  "
                    + "\n  ".join(lines),
                    where=self.folder,
                    do=f"--force makes {stage.name} and what follows again; name=other starts a "
                    "new run beside this one",
                )

    def remove(self, stage: Stage) -> None:
        """Deletes a stage's record and artefact, and those of every stage after it."""
        (self.folder / "stages" / f"{stage.name}.json").unlink(missing_ok=True)
        paths = [self.folder / stage.artefact]
        if stage.name == "head":
            paths.append(self.folder / "train")
        if stage.name == "answers":
            paths += self.folder.glob("answers*")
        for path in paths:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for other in STAGES.values():
            if other.after == stage.name:
                self.remove(other)

    @contextmanager
    def making(self, stage: Stage) -> Iterator[Path]:
        """Records that a stage is being made, then that it is whole; yields its artefact's path."""
        record = self.folder / "stages" / f"{stage.name}.json"
        write_json(record, {"complete": False, "inputs": self.inputs(stage)})
        yield self.folder / stage.artefact
        write_json(record, {"complete": True, "inputs": self.inputs(stage)})

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps a second process out of the run folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    "another draftlab process is working in this run",
                    where=self.folder,
                    do="wait for it to finish, or start a run of another name",
                ) from None
            yield

    def mark_latest(self) -> None:
        """Points runs/latest at this run."""
        link = self.folder.parent / LATEST
        temporary = self.folder.parent / f".{LATEST}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.folder.name)
        os.replace(temporary, link)


def find_run(name: str | None) -> Path:
    """The folder of a run by name or path; None: the latest.

    Raises:
        UserError: when there is none.
    """
    candidates = [RUNS / LATEST] if name is None else [Path(name), RUNS / name]
    for folder in candidates:
        if (folder / "recipe.yaml").is_file():
            return folder.resolve()
    raise UserError(
        "expected a run, found none" if name else "there is no run yet",
        where=candidates[-1],
        do="`draftlab train recipes/quickstart.yaml` makes one",
    )


def git_commit() -> str | None:
    """Commit of the working tree draftlab is run from, when it is one."""
    try:
        found = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
