"""The run folder: what was made from what, which stages fit a recipe, and `runs/latest`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftlab.errors import UserError
from draftlab.files import canonical_json, read_json, sha256_text, write_json, write_text
from draftlab.heads.family import get_family
from draftlab.pipeline.recipe import RENAMED_SETTINGS
from draftlab.pipeline.stages import ADDED, FREE, STAGES, Stage
from draftlab.store.store import check_store

RUNS = Path("runs")
LATEST = "latest"
State = Literal["done", "unfinished", "missing", "changed", "unneeded"]


@dataclass(frozen=True)
class Status:
    """How a stage of a run stands to a recipe.

    Attributes:
        state: "done", "unfinished" (begun with these inputs, or damaged), "missing", "changed",
            or "unneeded" (not whole, and whatever was to be made of it is).
        changes: setting → (value in the run, value asked for), for "changed".
        lacks: a file that it would read and that is not there; empty: none is known of.
    """

    stage: Stage
    state: State
    changes: dict[str, tuple[Any, Any]]
    lacks: str = ""


class Run:
    """A run folder and the inputs its stages would have under a recipe.

    Args:
        folder: runs/<name>.
        settings: every setting of the recipe by dotted name.
        files: content hashes of input files, by stage.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], files: dict[str, dict[str, str]]
    ) -> None:
        self.folder, self.settings, self.files = folder, settings, files

    def inputs(self, stage: Stage) -> dict[str, Any]:
        """All that decides what a stage makes, its predecessors' inputs included."""
        own = {
            key: value
            for key, value in self.settings.items()
            if key not in FREE and any(key == p or key.startswith(p + ".") for p in stage.settings)
        }
        before = self.inputs(STAGES[stage.after]) if stage.after else {}
        return before | own | self.files.get(stage.name, {})

    def key(self, stage: Stage) -> str:
        """Hex SHA-256 of a stage's inputs."""
        return sha256_text(canonical_json(self.inputs(stage)))

    def status(self, stage: Stage) -> Status:
        """Whether a stage's artefact is there, whole, and fits."""
        record = book(self.folder, stage)
        artefact = self.folder / stage.artefact
        if not record.exists():
            return Status(stage, "missing", {})
        found = read_book(record)
        inputs = self.inputs(stage)
        made = {key: ADDED[key] for key in ADDED.keys() & inputs.keys()}
        made |= _with_current_names(found["inputs"])
        # Round-trip through JSON, so that 1.0 and 1 compare as they were written.
        changes = {
            key: (made.get(key), inputs.get(key))
            for key in sorted(made.keys() | inputs.keys())
            if made.get(key) != inputs.get(key)
        }
        if changes:
            return Status(stage, "changed", changes)
        if found["complete"] and not artefact.exists():
            return Status(stage, "missing", {})
        whole = found["complete"] and all((artefact / name).is_file() for name in stage.files)
        if whole and stage.name == "store":
            try:
                check_store(artefact)
            except UserError:  # a shard was lost or cut; recording makes it again
                whole = False
        return Status(stage, "done" if whole else "unfinished", {})

    def plan(self, *last: str) -> list[Status]:
        """How the stages up to `last` stand, in order."""
        wanted = {stage.name for name in last for stage in self.chain(name)}
        statuses = {n: self.status(stage) for n, stage in STAGES.items() if n in wanted}
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

    def chain(self, last: str) -> list[Stage]:
        """The stages up to and including `last`, in order."""
        stage: Stage | None = STAGES[last]
        chain = []
        while stage is not None:
            chain.append(stage)
            stage = STAGES[stage.after] if stage.after else None
        return chain[::-1]

    def refuse_changes(self, statuses: list[Status]) -> None:
        """Raises a `UserError` that names the settings in which the run and the recipe differ."""
        for status in statuses:
            stage = status.stage
            if status.state == "changed" and not stage.cheap:
                lines = [
                    f"{key}: {made!r} in the run, {asked!r} now"
                    for key, (made, asked) in status.changes.items()
                ]
                raise UserError(
                    f"the run's stage {stage.name!r} was made with other settings:\n  "
                    + "\n  ".join(lines),
                    where=self.folder,
                    do=f"--force makes {stage.name} and what follows again; name=other starts a "
                    "new run beside this one",
                )

    def remove(self, stage: Stage) -> None:
        """Deletes a stage's record and artefact, and first those of every stage after it."""
        # In this order a crash leaves no stage whose record is older than what it was made from.
        for other in STAGES.values():
            if other.after == stage.name:
                self.remove(other)
        for path in self._paths(stage):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        book(self.folder, stage).unlink(missing_ok=True)

    def _paths(self, stage: Stage) -> set[Path]:
        """Where a stage's artefact is, and what leads to it."""
        paths = {self.folder / stage.artefact}
        if stage.name == "head":
            paths.add(self.folder / "train")
        if stage.name == "answers":
            paths.update(self.folder.glob("answers*"))
        return paths

    @contextmanager
    def making(self, stage: Stage) -> Iterator[Path]:
        """Records that a stage is being made, then that it is whole; yields its artefact's path."""
        record = book(self.folder, stage)
        try:
            with _booked(record, self.inputs(stage)):
                yield self.folder / stage.artefact
        except UserError:
            # What a wrong setting stopped before there was anything is begun anew with the right
            # one.
            if not any(path.is_file() or any(path.glob("*")) for path in self._paths(stage)):
                record.unlink(missing_ok=True)
            raise

    def adopt(self, recipe: str) -> None:
        """Writes recipe.yaml and points runs/latest at this run, where they are not so already."""
        path, link = self.folder / "recipe.yaml", self.folder.parent / LATEST
        if not path.exists() or path.read_text(encoding="utf-8") != recipe:
            write_text(path, recipe)
        if not (link.is_symlink() and os.readlink(link) == self.folder.name):
            temporary = link.with_name(f".{LATEST}.{os.getpid()}")
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(self.folder.name)
            os.replace(temporary, link)


def book(folder: Path, stage: Stage) -> Path:
    """The record of what a stage was made from."""
    return folder / "stages" / f"{stage.name}.json"


def read_book(path: Path) -> dict[str, Any]:
    """Reads a stage's record: `inputs` and whether it is `complete`."""
    found = read_json(path, kind="stage record")
    if not isinstance(found, dict) or not isinstance(found.get("inputs"), dict):
        raise UserError(
            "expected a stage record, found other JSON",
            where=path,
            do="delete it, and the stage is made again",
        )
    return {"complete": False} | found


@contextmanager
def _booked(record: Path, inputs: dict[str, Any]) -> Iterator[None]:
    write_json(record, {"complete": False, "inputs": inputs})
    yield
    write_json(record, {"complete": True, "inputs": inputs})


@contextmanager
def making_otherwise(folder: Path, stage: Stage, settings: dict[str, Any]) -> Iterator[None]:
    """Books a stage that is made with other settings than its recipe's; the run must be locked.

    The next `make` then knows that what lies there is not what the recipe asks for.
    """
    before = STAGES[stage.after] if stage.after else None
    inputs: dict[str, Any] = {}
    if before and book(folder, before).exists():
        inputs = read_book(book(folder, before))["inputs"]
    own = {key: value for key, value in settings.items() if key not in FREE}
    with _booked(book(folder, stage), inputs | own):
        yield


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Keeps a second process out of a run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                "another draftlab process is working in this run",
                where=folder,
                do="wait for it to finish, or start a run of another name",
            ) from None
        yield


def _with_current_names(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return a stage's inputs with the present names of renamed settings and families."""
    current = {RENAMED_SETTINGS.get(key, key): value for key, value in inputs.items()}
    if "head.family" in current:
        current["head.family"] = get_family(current["head.family"]).name
    return current


def find_run(name: str | None) -> Path:
    """The folder of a run by name or path; None: the latest.

    Raises:
        UserError: when there is none.
    """
    candidates = [RUNS / LATEST] if name is None else [Path(name), RUNS / name]
    for folder in candidates:
        if (folder / "recipe.yaml").is_file():
            return folder.resolve()
    known = sorted(path.parent.name for path in RUNS.glob("*/recipe.yaml"))
    known = [run for run in known if run != LATEST]
    raise UserError(
        f"expected a run, found none named {name!r}" if name else "there is no run yet",
        where=name or RUNS,
        do=f"runs here: {', '.join(known)}"
        if known
        else "`draftlab train recipes/quickstart.yaml` makes one",
    )


def git_commit() -> str | None:
    """Commit of the working tree draftlab is run from, when it is one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # a parent's repository would be somebody else's
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
