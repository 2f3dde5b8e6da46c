"""The manifest of a store: its target, its settings, its records and the hash of each shard.

manifest.json is small. It has the hashes of the index of records and of the table of shards, two
files of columns (docs/formats.md), which are mapped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError

from draftlab.errors import UserError
from draftlab.files import known_sha256, read_fields, write_json
from draftlab.kernels.fp8_linear import E4M3
from draftlab.settings import describe_errors
from draftlab.store.columns import write_columns
from draftlab.store.record_index import RECORDS, RecordIndex
from draftlab.store.settings import StoreDtype
from draftlab.store.shard import SHARDS, Shard, Shards, ShardTable

if TYPE_CHECKING:
    from draftlab.target_model.metadata import TargetMetadata
    from draftlab.target_model.model import Target

__all__ = ["MANIFEST", "Counts", "Dropped", "Manifest", "Shard", "StoreIdentity"]

SCHEMA = 1
MANIFEST = "manifest.json"
BOUNDARY_MEANING = "input-of-layer: b is the state entering layer b; num_layers: before final norm"
STATES = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "fp8": (E4M3, torch.bfloat16),
}
"""Dtypes of features and of the last state, by a store's dtype."""

_INDEX = (
    "index of the store's records",
    "record again into this folder, which writes the index again and keeps whole shards; a store "
    "made by `draftlab store merge` has to be made again",
)
_TABLE = (
    "table of the store's shards",
    "restore the file, or remove the store and record it again: only this file has the hashes of "
    "the shards",
)
T = TypeVar("T")
_ARGUMENTS, _WINDOW = "template_arguments", "window"


def template_arguments_setting(
    modes: Sequence[dict[str, Any]] | None,
) -> dict[str, list[dict[str, Any]] | None]:
    """Return the setting of a store whose records have these template arguments, if any has some
    (None: too many to list).
    """
    modes = None if modes is None else list(modes)
    return {} if modes == [{}] else {_ARGUMENTS: modes}


@dataclass(frozen=True)
class StoreIdentity:
    """The target and the format of a store. A store is used where all but the name agree."""

    target_name: str
    target_fingerprint: str
    tokenizer_sha256: str
    template_sha256: str
    boundaries: tuple[int, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: StoreDtype

    @classmethod
    def of(
        cls,
        target: Target | TargetMetadata,
        *,
        tokenizer_sha256: str,
        template_sha256: str,
        boundaries: tuple[int, ...],
        dtype: StoreDtype,
    ) -> StoreIdentity:
        """Return the identity of a target's store; only the last component of a path is kept."""
        name = target.name
        if name.startswith(("/", ".", "~")):  # of a GGUF file the folder is one of the cache
            name = (Path(name) if name.endswith(".gguf") else target.folder.resolve()).name
        return cls(
            name,
            target.fingerprint,
            tokenizer_sha256,
            template_sha256,
            tuple(boundaries),
            target.num_layers,
            target.hidden_size,
            target.vocab_size,
            dtype,
        )

    def tensors(self, records: int, tokens: int) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Return dtypes and shapes of the tensors of a shard with so many records and tokens."""
        (features, last), width = STATES[self.dtype], self.hidden_size
        scales = {"scales": (torch.float32, [tokens, self.fp8_boundaries])}
        return {
            "features": (features, [tokens, len(self.boundaries) * width]),
            **(scales if self.dtype == "fp8" else {}),
            "last": (last, [tokens, width]),
            "offsets": (torch.int64, [records + 1]),
            **{name: (torch.int32, [tokens]) for name in ("tokens", "spans", "argmax")},
            "logsumexp": (torch.float32, [tokens]),
        }

    @property
    def fp8_boundaries(self) -> int:
        """The number of boundaries whose features are stored in 8 bits."""
        return len(self.boundaries) if self.dtype == "fp8" else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in a shard."""
        tensors = self.tensors(0, 1)
        del tensors["offsets"]
        return sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors.values())

    def check(
        self,
        expected: StoreIdentity,
        where: Path,
        do: str = "name another store folder, or remove this one to record it again",
    ) -> None:
        """Raise a `UserError` with every field that differs from the expected identity, both
        values, and what to `do` about it.
        """
        actual_fields, expected_fields = asdict(self), asdict(expected)
        # The fingerprint decides whether it is the same target; folders may be renamed.
        differences = [
            f"{key}: expected {_as_text(expected_fields[key])}, found {_as_text(value)}"
            for key, value in actual_fields.items()
            if key != "target_name" and value != expected_fields[key]
        ]
        if differences:
            raise UserError(
                f"this store was recorded from {self.target_name!r} and does not fit "
                f"{expected.target_name!r}:\n  " + "\n  ".join(differences),
                where=where,
                do=do,
            )


def _as_text(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


@dataclass(frozen=True)
class StoreWindow:
    """The window of a store (`record.window`), as its manifest has it.

    The plan puts the held-out records into shards of their own, which come first and stay. The
    other shards come and go: a training reads them group by group (`train/batch/window_order.py`),
    and `workers/window/recorder.py` records and deletes them.

    Attributes:
        size: most bytes of shards that come and go.
        rolls: whether they are deleted once they are read.
        validation_share, seed: what decided the held-out records.
        validation_records, validation_shards: numbers of the first records and shards, which are
            the held-out ones.
    """

    size: int
    rolls: bool
    validation_share: float
    seed: int
    validation_records: int
    validation_shards: int

    def settings(self) -> dict[str, Any]:
        """Return the entry of a manifest's settings."""
        return {_WINDOW: asdict(self)}


class Counts(BaseModel, extra="forbid"):
    """Counts of the plan; loss_tokens are positions in answers."""

    records: int
    tokens: int
    loss_tokens: int


class Dropped(BaseModel, extra="forbid"):
    """Numbers of samples that are not in the store, by reason."""

    nothing_to_predict: int = 0
    """Samples without an answer of two tokens after truncation. The target itself always generates
    an answer's first token."""


class _File(BaseModel, extra="forbid"):
    """The content of manifest.json, without `schema`."""

    complete: bool
    identity: StoreIdentity
    boundary_meaning: str = BOUNDARY_MEANING
    samples_sha256: str
    """Hash of all samples before truncation: ids, token ids, spans, temperatures."""
    settings: dict[str, Any]
    """Settings of the recording."""
    counts: Counts
    dropped: Dropped
    truncated: int
    """Number of stored samples that were truncated to max_length."""
    records_sha256: str
    """SHA-256 of the index (records.safetensors)."""
    shards_sha256: str | None = None
    """SHA-256 of the table (shards.safetensors); None until the store is complete."""


class Manifest(_File, arbitrary_types_allowed=True):
    """The manifest. It is written with complete: false before the first shard, and at the end."""

    index: RecordIndex = Field(exclude=True, repr=False)
    table: ShardTable | None = Field(None, exclude=True, repr=False)
    """None until the store is complete."""

    @classmethod
    def plan(cls, index: RecordIndex, **fields: Any) -> Manifest:
        """Return the manifest of an incomplete store with these records."""
        return cls(complete=False, index=index, records_sha256=index.file_sha256(), **fields)

    @property
    def shards(self) -> Shards:
        """The shards; each is made when it is read."""
        return Shards(self.index, self.table)

    @property
    def window(self) -> StoreWindow | None:
        """The window of the store; None: it has none."""
        values = self.settings.get(_WINDOW)
        return (
            StoreWindow(**{f.name: values[f.name] for f in fields(StoreWindow)}) if values else None
        )

    @property
    def num_kept(self) -> int:
        """How many of the first shards are kept: all; of a window that rolls the held-out ones."""
        window = self.window
        return window.validation_shards if window and window.rolls else len(self.shards)

    @property
    def planned_sizes(self) -> np.ndarray:
        """int64 [shards]: the bytes that each shard's file has at most."""
        index, header = self.index, 1024
        tokens = index.shard_tokens * self.identity.bytes_per_token
        sizes: np.ndarray = tokens + 8 * index.shard_records + header
        return sizes

    @property
    def template_arguments(self) -> list[dict[str, Any]] | None:
        """The different template arguments of the records; None: too many to list."""
        modes = self.settings.get(_ARGUMENTS, [{}])
        return modes if isinstance(modes, list) else None

    @property
    def written(self) -> ShardTable:
        """The table of the shards, of a complete store."""
        if self.table is None:
            raise ValueError("this store has no written shards")
        return self.table

    def completed(self, table: ShardTable) -> Manifest:
        """Return the manifest of the complete store."""
        update = {"complete": True, "table": table, "shards_sha256": table.file_sha256()}
        return self.model_copy(update=update)

    def as_plan(self) -> Manifest:
        """Return the manifest before any shard was written."""
        blank = {"table": None, "shards_sha256": None}
        return self.model_copy(update={"complete": False, **blank})

    def dump(self) -> dict[str, Any]:
        """Return the content of manifest.json, with the key `schema` first.

        A store's digest and the key of a training are made of it.
        """
        return {"schema": SCHEMA, **self.model_dump(mode="json")}

    def write(self, folder: Path) -> None:
        """Write manifest.json, and before it the index and the table, unless the folder has them.

        A crash before the last write leaves the former manifest with the files that it needs.
        """
        self.write_index(folder)
        path = folder / SHARDS
        if self.shards_sha256 and self.table and not _has_hash(path, self.shards_sha256):
            write_columns(self.table.columns(), path)
        write_json(folder / MANIFEST, self.dump())

    def write_index(self, folder: Path) -> None:
        """Write the index of the records, unless the folder has it."""
        path = folder / RECORDS
        if not _has_hash(path, self.records_sha256):
            write_columns(self.index.columns(), path)

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest and map its columns; raise a `UserError` if there is none, it does not
        fit this version of the schema, or one of the files of columns is missing or damaged.
        """
        fields = read_fields(path, {}, kind="store's manifest.json")
        version = fields.pop("schema", None)
        if version != SCHEMA or isinstance(version, bool):
            raise UserError(
                f"expected store schema {SCHEMA}, found {version}",
                where=path,
                do="record again with this version of draftlab",
            )
        try:
            file = _File.model_validate(fields)
        except ValidationError as error:
            raise UserError(
                "expected a store's manifest, found one that does not fit the schema:\n  "
                + describe_errors(error),
                where=path,
                do="record again, or fetch the store again; a shard's file is shard-NNNNN."
                "safetensors beside the manifest",
            ) from None
        index = _mapped(path.with_name(RECORDS), file.records_sha256, _INDEX, RecordIndex.map)
        table = None
        if file.shards_sha256:

            def read_table(path: Path) -> ShardTable:
                table = ShardTable.map(path)
                table.check(index, file.identity.fp8_boundaries)
                return table

            table = _mapped(path.with_name(SHARDS), file.shards_sha256, _TABLE, read_table)
        if file.complete and table is None:
            raise UserError(
                "expected the hashes of a complete store's shards, found none",
                where=path,
                do="fetch the store again, or record it again",
            )
        return cls.model_construct(**dict(file), index=index, table=table)


def _mapped(path: Path, digest: str, kind: tuple[str, str], parse: Callable[[Path], T]) -> T:
    """Return what `parse` makes of a file with this hash; `kind` says what it is, and what to do
    without it.
    """
    name, do = kind
    if path.is_symlink() or not _has_hash(path, digest):
        raise UserError(
            f"the {name} is missing or damaged: expected a file with SHA-256 {digest}",
            where=path,
            do=do,
        )
    try:
        return parse(path)
    except ValueError as error:
        raise UserError(
            f"expected the {name}, found something else: {error}",
            where=path,
            do="fetch the store again, or record it again",
        ) from None


def _has_hash(path: Path, digest: str | None) -> bool:
    return path.is_file() and known_sha256(path) == digest
