"""run.json: the files of a run that are at a URL, with their sizes and hashes.

It is written after the files that it names, and no file that it names is replaced or removed. So
whatever is killed, all that it names is there.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftlab.errors import UserError
from draftlab.files import known_sha256
from draftlab.settings import describe_errors
from draftlab.store.object_store import UrlFolder

RUN = "run.json"
CHECKPOINTS = "train/checkpoints"
RUN_FILES = ("recipe.yaml", "provenance.json")
STAGE_FILES = {
    "answers": ("answers.jsonl", "answers.json"),
    "head": ("head/*", "train/metrics.jsonl", "train/best/*"),
    "eval": ("eval/*",),
    "export": ("export/*/*",),
}
"""Patterns of the files of complete stages that are copied. The store's shards are at
`record.url`, and without it nothing of the store is copied."""
_PART = r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*"
_NAME = re.compile(
    rf"recipe\.yaml|provenance\.json|answers\.jsonl?|stages/({'|'.join(STAGE_FILES)})\.json"
    rf"|train/metrics\.jsonl|(train/best|head|eval|export/{_PART})/{_PART}"
    rf"|{CHECKPOINTS}/step-(?P<step>\d{{7}})/(best/)?{_PART}"
)


class CopiedFile(BaseModel):
    """A file at the URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @classmethod
    def of(cls, path: Path) -> CopiedFile:
        """Return what a file of this machine is at the URL."""
        return cls(bytes=path.stat().st_size, sha256=known_sha256(path))


class CopiedRun(BaseModel):
    """The content of run.json.

    Attributes:
        id: of the run; machines that go on with it have the same.
        name: of the run.
        files: by their names in the run folder. A checkpoint's folder also has the metrics and the
            best head as they were when it was written.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = Field(1, alias="schema")
    id: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    name: str
    files: dict[Annotated[str, Field(pattern=f"^({_NAME.pattern})$")], CopiedFile] = {}

    @classmethod
    def read(cls, remote: UrlFolder) -> CopiedRun | None:
        """Read the run.json at a URL; None: there is none.

        Raises:
            UserError: it is another file, or the URL does not answer.
        """
        content = remote.read(RUN)
        if content is None:
            return None
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            raise UserError(
                f"expected the list of a run's files, found another file:\n  "
                f"{describe_errors(error)}",
                where=remote.where(RUN),
                do="name another folder (run.url), or remove the file: the files beside it are "
                "then copied again",
            ) from None

    def write(self, remote: UrlFolder) -> None:
        """Write it to a URL."""
        text = json.dumps(self.model_dump(by_alias=True), indent=1, ensure_ascii=False)
        remote.write(RUN, text.encode())

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, oldest first."""
        matches = map(_NAME.fullmatch, self.files)
        return sorted({int(match["step"]) for match in matches if match and match["step"]})

    def checkpoint(self, step: int) -> dict[str, CopiedFile]:
        """Return the files of a checkpoint by their names in its folder."""
        prefix = checkpoint_prefix(step)
        return {
            name.removeprefix(prefix): file
            for name, file in self.files.items()
            if name.startswith(prefix)
        }

    def of_stage(self, stage: str) -> list[str]:
        """Return the names of the files of a complete stage."""
        return [
            name
            for name in self.files
            if any(fnmatchcase(name, pattern) for pattern in STAGE_FILES[stage])
        ]


def checkpoint_prefix(step: int) -> str:
    """Return what the names of a checkpoint's files begin with."""
    return f"{CHECKPOINTS}/step-{step:07d}/"


def files_to_copy(folder: Path, complete: dict[str, bool]) -> dict[str, Path]:
    """Return the files of a run folder that are copied, without checkpoints, by name.

    Args:
        complete: whether a stage is complete, for those that have begun.
    """
    patterns = [*RUN_FILES]
    for stage in complete.keys() & STAGE_FILES.keys():
        patterns += [f"stages/{stage}.json", *(STAGE_FILES[stage] if complete[stage] else ())]
    names = {
        path.relative_to(folder).as_posix(): path
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
        if path.is_file() and not path.is_symlink()
    }
    return {name: path for name, path in names.items() if _NAME.fullmatch(name)}
