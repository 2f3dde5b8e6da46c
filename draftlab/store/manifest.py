"""The manifest of a store (manifest.json): its target, its records and the hash of each shard."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from draftlab.errors import UserError
from draftlab.files import atomic_path, known_sha256, read_json, write_json
from draftlab.settings import describe_errors
from draftlab.store.identity import StoreIdentity
from draftlab.store.record_index import RECORDS, RecordIndex, Window

SCHEMA_VERSION = 2
MANIFEST = "manifest.json"
BOUNDARY_MEANING = "input-of-layer: b is the state entering layer b; num_layers: before final norm"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Shard(_Strict):
    """A shard: its place in the index of records, and the hash of the committed file."""

    file: Annotated[str, Field(pattern=r"^shard-[0-9]{5,}\.safetensors$")]
    records: Annotated[int, Field(ge=0)]
    tokens: Annotated[int, Field(ge=0)]
    """Number of stored positions."""
    bytes: int | None = None
    sha256: str | None = None
    not_finite: dict[str, str] = {}
    """Ids of records with NaN or infinity, and where: stored as zeros, with no answer span."""
    fp8_errors: list[tuple[float, float]] = []
    """For each boundary, the relative error of its features as read, and of its worst channel."""
    _window: Window = PrivateAttr()

    @classmethod
    def of(
        cls,
        file: str,
        ids: Sequence[str],
        lengths: Sequence[int],
        temperatures: Sequence[float | None],
        batches: Sequence[Sequence[int]],
        **fields: Any,
    ) -> Shard:
        """Return a shard with its records in stored order.

        Args:
            batches: numbers of the shard's records that share a forward pass, which decide the
                states' last bits; none: unknown.
        """
        shard = cls(file=file, records=len(ids), tokens=sum(lengths), **fields)
        index = RecordIndex.of(ids, lengths, temperatures, batches)
        shard._window = Window(index, 0, len(ids))
        return shard

    def committed(self, fields: dict[str, Any]) -> Shard:
        """Return the shard with fields of its receipt."""
        shard = Shard.model_validate(self.model_dump() | fields)
        shard._window = self._window
        return shard

    @property
    def ids(self) -> list[str]:
        """The records' ids."""
        return self._window.index.read_ids(self._window.rows)

    @property
    def lengths(self) -> list[int]:
        """The records' numbers of tokens."""
        return self._window.index.read_lengths(self._window.rows)

    @property
    def temperatures(self) -> list[float | None]:
        """The records' sampling temperatures."""
        return self._window.index.read_temperatures(self._window.rows)

    @property
    def batches(self) -> list[list[int]]:
        """Numbers of the shard's records that share a forward pass."""
        return self._window.batches()

    def schema_1(self) -> dict[str, Any]:
        """Return the fields that a shard had in manifests of schema 1."""
        fields = self.model_dump(mode="json", exclude={"records", "tokens"})
        records = ("ids", "lengths", "temperatures", "batches")
        return {"file": fields.pop("file"), **{n: getattr(self, n) for n in records}, **fields}

    def path(self, folder: Path) -> Path:
        """Return the path of a shard's file in the store's folder.

        Raises:
            UserError: it is a symbolic link that leads out of the folder.
        """
        path = folder / self.file
        if path.is_symlink() and path.resolve().parent != folder.resolve():
            raise UserError(
                "expected shards in the store's folder, found a symbolic link that leads out of it",
                where=path,
                do="copy the file that it leads to into the store, if you trust it; whoever made "
                "this store chose which of your files it leads to",
            )
        return path

    def problem(self, folder: Path) -> str | None:
        """Return what is wrong with the existence or size of a shard's file; None if nothing."""
        path = self.path(folder)
        if not path.is_file():
            return "a shard of the store is missing"
        size = path.stat().st_size
        if size == self.bytes:
            return None
        return (
            f"expected a shard of {self.bytes} bytes, found {size}: it is truncated or belongs to "
            "another store"
        )


class Counts(_Strict):
    """Counts of the plan; loss_tokens are positions in answers, of `not_finite` records too."""

    records: int
    tokens: int
    loss_tokens: int


class Dropped(_Strict):
    """Numbers of samples that are not in the store, by reason."""

    overlong: int = 0
    """Samples longer than max_length, with overlong: skip."""
    nothing_to_predict: int = 0
    """Samples without an answer of two tokens after truncation. The target itself always generates
    an answer's first token."""


class Manifest(_Strict):
    """The manifest. It is written with complete: false before the first shard, and at the end."""

    # The alias of `settings` is its name in the file.
    model_config = ConfigDict(extra="forbid", validate_by_name=True, serialize_by_alias=True)

    schema_version: int = SCHEMA_VERSION
    complete: bool
    online: bool = False
    """Whether there are no shards, because training computes their states on demand."""
    identity: StoreIdentity
    boundary_meaning: str = BOUNDARY_MEANING
    samples_sha256: str
    """Hash of all samples before truncation: ids, token ids, spans, temperatures."""
    settings: dict[str, Any] = Field(alias="knobs")
    """Settings of the recording; their key in the file is `knobs`."""
    counts: Counts
    dropped: Dropped
    truncated: int
    """Number of stored samples that were truncated to max_length."""
    records_sha256: str | None = None
    """SHA-256 of the index (records.safetensors); None in schema 1."""
    shards: list[Shard] = Field(min_length=1)

    @model_serializer(mode="wrap")
    def _serialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        if self.schema_version == 1:
            del fields["records_sha256"]
            fields["shards"] = [shard.schema_1() for shard in self.shards]
        return fields

    @property
    def index(self) -> RecordIndex:
        """The index of all records."""
        return RecordIndex.join([shard._window for shard in self.shards])

    def with_index(self) -> Manifest:
        """Return the manifest with one index of all records, and with its hash."""
        manifest = self._attached(self.index)
        if manifest.schema_version > 1:
            manifest.records_sha256 = hashlib.sha256(manifest.index.to_bytes()).hexdigest()
        return manifest

    def _attached(self, index: RecordIndex) -> Manifest:
        """Return the manifest with the index of its shards' records."""
        shards, start = [shard.model_copy() for shard in self.shards], 0
        for shard in shards:
            shard._window = Window(index, start, start + shard.records)
            start += shard.records
        return self.model_copy(update={"shards": shards})

    def dump(self) -> dict[str, Any]:
        """Return the manifest as JSON values, with the key `schema` first."""
        fields = self.model_dump(mode="json")
        return {"schema": fields.pop("schema_version"), **fields}

    def write(self, folder: Path) -> None:
        """Write manifest.json, and before it the index, unless the folder has it."""
        self.write_index(folder)
        write_json(folder / MANIFEST, self.dump())

    def write_index(self, folder: Path) -> None:
        """Write the index of the records, unless the folder has it."""
        path = folder / RECORDS
        if self.schema_version > 1 and not _has_hash(path, self.records_sha256):
            with atomic_path(path) as temporary:
                temporary.write_bytes(self.index.to_bytes())

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest and map its index.

        Raises:
            UserError: there is none, it has another schema version, it does not fit the schema, or
                the index of the records is missing or damaged.
        """
        fields = read_json(path, kind="store's manifest.json")
        version = fields.pop("schema", None) if isinstance(fields, dict) else None
        if version not in (1, SCHEMA_VERSION):
            raise UserError(
                f"expected store schema 1 or {SCHEMA_VERSION}, found {version}",
                where=path,
                do="record again with this version of draftlab",
            )
        try:
            if version == 1:
                return _read_schema_1(fields)
            manifest = cls.model_validate(fields)
        except ValidationError as error:
            raise UserError(
                "expected a store's manifest, found one that does not fit the schema:\n  "
                + describe_errors(error),
                where=path,
                do="record again, or fetch the store again; a shard's file is shard-NNNNN."
                "safetensors beside the manifest",
            ) from None
        file = path.with_name(RECORDS)
        if file.is_symlink() or not _has_hash(file, manifest.records_sha256):
            raise UserError(
                "the index of the store's records is missing or damaged: expected a file with "
                f"SHA-256 {manifest.records_sha256}",
                where=file,
                do="record again into this folder, which writes the index again and keeps whole "
                "shards; a store made by `draftlab store` has to be made again",
            )
        try:
            index = RecordIndex.map(file)
        except ValueError as error:
            raise UserError(
                f"expected the index of a store's records, found another file: {error}",
                where=file,
                do="fetch the store again, or record it again",
            ) from None
        records = sum(shard.records for shard in manifest.shards)
        if records != len(index.lengths):
            raise UserError(
                f"expected {len(index.lengths)} records, found {records}",
                where=path,
                do="restore both files, or record the store again",
            )
        return manifest._attached(index)


class _Schema1Records(_Strict):
    """Fields of a shard in manifests of schema 1, which had no index."""

    ids: list[str]
    lengths: list[int]
    temperatures: list[float | None]
    batches: list[list[int]]


def _read_schema_1(fields: dict[str, Any]) -> Manifest:
    records, shards = [], fields.get("shards", [])
    if not isinstance(shards, list) or not all(isinstance(shard, dict) for shard in shards):
        return Manifest.model_validate({"schema_version": 1, **fields})  # which says what is wrong
    for shard in shards:
        columns = {name: shard.pop(name, None) for name in _Schema1Records.model_fields}
        records.append(_Schema1Records.model_validate(columns))
        shard |= {"records": len(records[-1].ids), "tokens": sum(records[-1].lengths)}
    manifest = Manifest.model_validate({"schema_version": 1, **fields})
    indices = [RecordIndex.of(**record.model_dump()) for record in records]
    return manifest._attached(
        RecordIndex.join([Window(index, 0, len(index.lengths)) for index in indices])
    )


def _has_hash(path: Path, digest: str | None) -> bool:
    return path.is_file() and known_sha256(path) == digest
