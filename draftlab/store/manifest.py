"""The manifest of a store (manifest.json): its target, its records and the hash of each shard."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftlab.errors import UserError
from draftlab.files import read_json, same_fingerprint
from draftlab.settings import describe_errors

if TYPE_CHECKING:
    from draftlab.target_model.metadata import TargetMetadata
    from draftlab.target_model.model import Target

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
BOUNDARY_MEANING = "input-of-layer: b is the state entering layer b; num_layers: before final norm"
StoreDtype = Literal["bfloat16", "float32", "fp8"]


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
        is_local = target.name.startswith(("/", ".", "~"))
        return cls(
            target.folder.resolve().name if is_local else target.name,
            target.fingerprint,
            tokenizer_sha256,
            template_sha256,
            tuple(boundaries),
            target.num_layers,
            target.hidden_size,
            target.vocab_size,
            dtype,
        )

    def tensor_shapes(self, shard: Shard) -> dict[str, list[int]]:
        """Return the names and shapes of a shard's tensors."""
        tokens, width = shard.tokens, self.hidden_size
        per_token = {name: [tokens] for name in ("tokens", "spans", "logsumexp", "argmax")}
        scales = {"scales": [tokens, len(self.boundaries)]} if self.dtype == "fp8" else {}
        return {
            "features": [tokens, len(self.boundaries) * width],
            **scales,
            "last": [tokens, width],
            "offsets": [len(shard.ids) + 1],
            **per_token,
        }

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in a shard."""
        boundaries, width = len(self.boundaries), self.hidden_size
        state_bytes = {
            "bfloat16": 2 * (boundaries + 1) * width,
            "float32": 4 * (boundaries + 1) * width,
            "fp8": boundaries * (width + 4) + 2 * width,
        }
        return state_bytes[self.dtype] + 16

    def check(self, expected: StoreIdentity, where: Path) -> None:
        """Check that the store with this identity is one of the expected identity.

        Raises:
            UserError: every field that differs, with both values.
        """
        actual_fields, expected_fields = asdict(self), asdict(expected)
        # The fingerprint decides whether it is the same target; folders may be renamed.
        differences = [
            f"{key}: expected {_as_text(expected_fields[key])}, found {_as_text(value)}"
            for key, value in actual_fields.items()
            if key != "target_name" and not same_fingerprint(value, expected_fields[key])
        ]
        if differences:
            raise UserError(
                f"this store was recorded from {self.target_name!r} and does not fit "
                f"{expected.target_name!r}:\n  " + "\n  ".join(differences),
                where=where,
                do="name another store folder, or remove this one to record it again",
            )


def _as_text(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Shard(_Strict):
    """A shard: its records in stored order, their batches, and the hash of the committed file."""

    file: Annotated[str, Field(pattern=r"^shard-[0-9]{5,}\.safetensors$")]
    ids: list[str]
    lengths: list[int]
    temperatures: list[float | None]
    batches: list[list[int]]
    """Numbers of the shard's records that share a forward pass. They decide the states' last bits.
    """
    bytes: int | None = None
    sha256: str | None = None
    not_finite: dict[str, str] = {}
    """Ids of records with NaN or infinity, and where: stored as zeros, with no answer span."""
    fp8_errors: list[tuple[float, float]] = []
    """For each boundary, the relative error of its features as read, and of its worst channel."""

    @property
    def tokens(self) -> int:
        """Number of stored positions."""
        return sum(self.lengths)

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
    shards: list[Shard]

    def dump(self) -> dict[str, Any]:
        """Return the manifest as JSON values, with the key `schema` first."""
        fields = self.model_dump(mode="json")
        return {"schema": fields.pop("schema_version"), **fields}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest.

        Raises:
            UserError: there is none, it has another schema version, or it does not fit the schema.
        """
        fields = read_json(path, kind="store's manifest.json")
        version = fields.pop("schema", None) if isinstance(fields, dict) else None
        if version != SCHEMA_VERSION:
            raise UserError(
                f"expected store schema {SCHEMA_VERSION}, found {version}",
                where=path,
                do="record again with this version of draftlab",
            )
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise UserError(
                "expected a store's manifest, found one that does not fit the schema:\n  "
                + describe_errors(error),
                where=path,
                do="record again, or fetch the store again; a shard's file is shard-NNNNN."
                "safetensors beside the manifest",
            ) from None
