"""The stages of a run: what each reads and writes, and its record stages/<name>.json."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftlab.files import known_sha256, read_fields, write_json
from draftlab.heads.folder import CONFIG, WEIGHTS
from draftlab.servers.settings import ServerSettings
from draftlab.store.manifest import MANIFEST
from draftlab.store.settings import StateServerSettings
from draftlab.target_model.settings import VllmSettings
from draftlab.train.settings import is_free

REPORT = "report.json"


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline.

    Attributes:
        name: also the name of its record in `stages/`.
        after: the stage whose artefact it reads.
        settings: prefixes of the recipe's settings that decide its result.
        artefact: file or folder in the run folder.
        files: files that a complete artefact folder has.
        hashed: glob pattern, in the run folder, of the files whose hashes its record keeps.
        cheap: runs again without --force when a setting changed.
        with_window: further settings that decide its result if record.window is set.
    """

    name: str
    after: str | None
    settings: tuple[str, ...]
    artefact: str
    files: tuple[str, ...] = ()
    hashed: str = ""
    cheap: bool = False
    with_window: tuple[str, ...] = ()


STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "answers",
            None,
            ("seed", "target", "prompts", "regenerate"),
            "answers.jsonl",
            hashed="answers.jsonl",
        ),
        Stage(
            "store",
            "answers",
            ("record",),
            "store",
            (MANIFEST,),
            hashed=f"store/{MANIFEST}",
            with_window=("train.validation_share",),  # besides the seed, an input of the answers
        ),
        Stage(
            "head",
            "store",
            ("seed", "draft_vocab", "head", "train"),
            "head",
            (CONFIG, WEIGHTS),
            hashed="head/*",
        ),
        Stage("eval", "head", ("eval",), "eval", (REPORT,), hashed=f"eval/{REPORT}", cheap=True),
        Stage("export", "eval", ("export",), "export", hashed="export/*/*", cheap=True),
    )
}
SETTINGS_WITHOUT_EFFECT = {
    "target.path",  # its fingerprint and the prompts' SHA-256 are inputs
    "prompts.source",
    "prompts.revision",
    "target.device",
    "target.gpus",
    "record.url",
    "record.server",
    *(f"record.server.{name}" for name in StateServerSettings.model_fields),
    *(f"regenerate.server.{name}" for name in ServerSettings.model_fields if name != "model"),
    *(f"{s}.vllm.{name}" for s in ("regenerate", "record") for name in VllmSettings.model_fields),
}
"""Settings that change how a stage runs and not its result, beside those of training
(`train.settings.is_free`)."""


def settings_with_effect(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a stage's result depends on, by dotted name."""
    train = {
        key.removeprefix("train."): value
        for key, value in settings.items()
        if key.startswith("train.")
    }
    free = SETTINGS_WITHOUT_EFFECT | {f"train.{name}" for name in train if is_free(name, train)}
    return {key: value for key, value in settings.items() if key not in free}


def record_path(folder: Path, stage: Stage) -> Path:
    """Return the path of a stage's record."""
    return folder / "stages" / f"{stage.name}.json"


def read_record(path: Path) -> dict[str, Any]:
    """Return a stage's record: its `inputs` and whether it is `complete`."""
    return read_fields(
        path,
        {"inputs": dict, "complete": bool},
        kind="stage record",
        do="remove the file: the stage then runs again, and continues from what is there",
    )


@contextmanager
def recorded(folder: Path, stage: Stage, inputs: dict[str, Any], **fields: Any) -> Iterator[None]:
    """Record a stage as started with these inputs, and at the end of the block as complete, both
    with further fields. Its `seconds` are null if it had begun before.
    """
    record, start = record_path(folder, stage), time.perf_counter()
    began_before = record.exists()
    if stage.after == "head":
        weights = folder / STAGES["head"].artefact / WEIGHTS
        fields["head_sha256"] = known_sha256(weights) if weights.is_file() else ""
    write_json(record, {"complete": False, "inputs": inputs} | fields)
    yield
    files = [path for path in sorted(folder.glob(stage.hashed)) if path.is_file()]
    hashes = {str(path.relative_to(folder)): known_sha256(path) for path in files}
    fields["seconds"] = None if began_before else round(time.perf_counter() - start, 1)
    write_json(record, {"complete": True, "inputs": inputs, "sha256": hashes} | fields)


@contextmanager
def recorded_with(folder: Path, stage: Stage, settings: dict[str, Any]) -> Iterator[None]:
    """Record a stage that runs with other settings than the run's recipe; the run must be locked.

    `Run.status` then reports the stage as changed.
    """
    inputs: dict[str, Any] = {}
    if stage.after and (path := record_path(folder, STAGES[stage.after])).exists():
        inputs = read_record(path)["inputs"]
    with recorded(folder, stage, inputs | settings_with_effect(settings)):
        yield
