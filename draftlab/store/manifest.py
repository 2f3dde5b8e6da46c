"""manifest.json: whose states a store holds, which records lie where, how to know them again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftlab.errors import UserError
from draftlab.files import read_json

if TYPE_CHECKING:
    from draftlab.target_model.metadata import TargetMetadata
    from draftlab.target_model.model import Target

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
BOUNDARY_MEANING = "input-of-layer: b is the state entering layer b; num_layers: before final norm"
StoreDtype = Literal["bfloat16", "float32", "fp8"]


@dataclass(frozen=True)
class StoreIdentity:
    """Whose states a store holds. All but the name must agree for a store to be used."""

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
        """The identity of a target; a local folder is named by its last component."""
        local = target.name.startswith(("/", ".", "~"))
        return cls(
            target.folder.resolve().name if local else target.name,
            target.fingerprint,
            tokenizer_sha256,
            template_sha256,
            tuple(boundaries),
            target.num_layers,
            target.hidden_size,
            target.vocab_size,
            dtype,
        )

    def shapes(self, shard: Shard) -> dict[str, list[int]]:
        """Names and shapes of the tensors of one of the store's shards."""
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
    def token_bytes(self) -> int:
        """Bytes of a token in a shard."""
        wide, width = len(self.boundaries), self.hidden_size
        of_states = {
            "bfloat16": 2 * (wide + 1) * width,
            "float32": 4 * (wide + 1) * width,
            "fp8": wide * (width + 4) + 2 * width,
        }
        return of_states[self.dtype] + 16

    def check(self, expect: StoreIdentity, where: Path) -> None:
        """Refuses a store (self) that was made for something else than `expect`.

        Raises:
            UserError: every field that differs, with both values.
        """
        found, wanted = asdict(self), asdict(expect)
        # The fingerprint says whether it is the same target; folders may be renamed.
        lines = [
            f"{key}: expected {_shown(wanted[key])}, found {_shown(found[key])}"
            for key in found
            if key != "target_name" and found[key] != wanted[key]
        ]
        if lines:
            raise UserError(
                f"this store was recorded from {self.target_name!r} and does not fit "
                f"{expect.target_name!r}:\n  " + "\n  ".join(lines),
                where=where,
                do="name another store folder, or remove this one to record it again",
            )


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Shard(_Strict):
    """One shard: its records in stored order, how they are batched, and its committed bytes."""

    file: str
    ids: list[str]
    lengths: list[int]
    temperatures: list[float | None]
    batches: list[list[int]]
    """Which of the shard's records share a forward pass; it decides the last bits of the states."""
    bytes: int | None = None
    sha256: str | None = None
    not_finite: dict[str, str] = {}
    """Ids of records with NaN or infinity, and where: stored as zeros, outside of any answer."""
    fp8_errors: list[tuple[float, float]] = []
    """Relative error of each boundary's features as read, and of its worst channel."""

    @property
    def tokens(self) -> int:
        """Stored positions."""
        return sum(self.lengths)

    def problem(self, folder: Path) -> str | None:
        """What is wrong with a committed shard as far as its size tells; None: nothing."""
        path = folder / self.file
        if not path.is_file():
            return "a shard of the store is missing"
        found = path.stat().st_size
        if found == self.bytes:
            return None
        return f"expected a shard of {self.bytes} bytes, found {found}: it is truncated or foreign"


class Counts(_Strict):
    """What was planned; loss_tokens are positions inside answers (`not_finite` ones included)."""

    records: int
    tokens: int
    loss_tokens: int


class Dropped(_Strict):
    """Samples that are not in the store, by reason."""

    overlong: int = 0
    """Longer than max_length, with overlong: skip."""
    nothing_to_predict: int = 0
    """No answer of two tokens (after truncation): the first one is the target's own work."""


class Manifest(_Strict):
    """manifest.json. Written with complete: false before the first shard, and again at the end."""

    # The alias of `settings` is its name in the file.
    model_config = ConfigDict(extra="forbid", validate_by_name=True, serialize_by_alias=True)

    schema_version: int = SCHEMA_VERSION
    complete: bool
    online: bool = False
    """Whether there are no shards: what they would hold is made while training."""
    identity: StoreIdentity
    boundary_meaning: str = BOUNDARY_MEANING
    samples_sha256: str
    """Of all samples as given: ids, token ids, spans, temperatures."""
    settings: dict[str, Any] = Field(alias="knobs")
    """Settings of the recording; the file calls them `knobs`."""
    counts: Counts
    dropped: Dropped
    truncated: int
    """Samples that were cut to max_length and are in the store."""
    shards: list[Shard]

    def dump(self) -> dict[str, Any]:
        """As JSON, key `schema` first."""
        fields = self.model_dump(mode="json")
        return {"schema": fields.pop("schema_version"), **fields}

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Reads and checks a manifest of this schema version."""
        fields = read_json(path, kind="store's manifest.json")
        version = fields.get("schema") if isinstance(fields, dict) else None
        if version != SCHEMA_VERSION:
            raise UserError(
                f"expected store schema {SCHEMA_VERSION}, found {version}",
                where=path,
                do="record again with this version of draftlab",
            )
        try:
            return cls.model_validate({k: v for k, v in fields.items() if k != "schema"})
        except ValidationError as error:
            raise UserError(
                f"expected a store's manifest, found one that does not fit: {error}", where=path
            ) from None
