"""Records of stages, stages/<name>.json: the inputs, and the hashes of what was written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftlab.files import known_sha256, read_fields, sha256_file, write_json
from draftlab.heads.folder import WEIGHTS
from draftlab.run.stages import STAGES, Stage, settings_with_effect


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


def head_sha256(folder: Path) -> str:
    """Return the hex SHA-256 of the weights of a run's head; "" if there are none."""
    weights = folder / STAGES["head"].artefact / WEIGHTS
    return known_sha256(weights) if weights.is_file() else ""


@contextmanager
def recorded(folder: Path, stage: Stage, inputs: dict[str, Any], **fields: Any) -> Iterator[None]:
    """Record a stage as started with these inputs, and at the end of the block as complete.

    Args:
        fields: further ones of the record.
    """
    record = record_path(folder, stage)
    if stage.after == "head":
        fields = fields | {"head_sha256": head_sha256(folder)}
    write_json(record, {"complete": False, "inputs": inputs} | fields)
    yield
    files = [path for path in sorted(folder.glob(stage.hashed)) if path.is_file()]
    hashes = {str(path.relative_to(folder)): sha256_file(path) for path in files}
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


def shards_elsewhere(folder: Path, record: dict[str, Any], url: str | None) -> str:
    """Return where the shards of a run's store are, if not at a URL (None: in the run), or ""."""
    former = record.get("url")
    if former == url:
        return ""
    place = f"at {former}" if former else f"in {folder / STAGES['store'].artefact}"
    return f"its shards are {place}, and record.url is {url or 'not set'}"
