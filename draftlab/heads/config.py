"""Model of draftlab.json, the single source of truth for a head's forward pass.

`HeadConfig` has the fields of all families. Each family extends it in the file of its module, and
`make_head_config` picks the family's model by the key `family`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, field_validator, model_validator

from draftlab.formatting import count_text
from draftlab.heads.family import get_family
from draftlab.heads.rope import rope_frequencies, used_rope

HEAD_SCHEMA = 1
USUAL_K = 4
"""Drafts a step that an evaluation takes at most by itself."""


class TargetIdentity(BaseModel, extra="forbid", frozen=True):
    """The name and the content hashes of the target that a head was trained for."""

    name: str
    fingerprint: str
    architecture: str
    tokenizer_sha256: str
    template_sha256: str


Size = Annotated[int, Field(ge=1, le=2**28)]  # tensors then have fewer than 2^63 bytes
HeadDim = Annotated[int, Field(ge=2, multiple_of=2, le=65_536)]
"""Rotary frequencies [head_dim / 2] are computed to check a config, hence the upper bound."""


class _PositionRange(BaseModel):
    stop: Size


class _ValidationMetrics(BaseModel):
    by_position: list[_PositionRange] = []


class _BetterValidation(BaseModel):
    step: int
    predicted_al: float


class _ImportSource(BaseModel):
    layout: str


class _ProvenanceFields(BaseModel):
    """The parts of a provenance that draftlab reads; a head from elsewhere may have any others."""

    imported: _ImportSource | None = None
    validation: _ValidationMetrics | None = None
    better_validation: _BetterValidation | None = None
    template_arguments: list[dict[str, Any]] | None = None


class HeadConfig(BaseModel, extra="forbid", frozen=True):
    """Shape, boundaries and conventions of a head of any family (methods §2, §4).

    Boundary b is the input of the target's layer b (b = number of layers: the state before the
    final norm). `boundary_meaning` states this in the file, since other programs count outputs.
    """

    schema_version: int = Field(default=HEAD_SCHEMA, alias="schema")
    family: str
    boundaries: tuple[int, ...]
    boundary_meaning: Literal["input-of-layer"] = "input-of-layer"
    target_num_layers: Size
    target_hidden_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: HeadDim
    rms_norm_eps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    rope_parameters: dict[str, Any]
    max_position_embeddings: Size
    vocab_size: Size
    draft_vocab_size: Size
    num_layers: int = Field(default=1, ge=1, le=1024)
    embeddings: Literal["target", "own"] = "target"
    k_trained: Size
    target: TargetIdentity
    provenance: dict[str, Any] = {}

    @field_validator("provenance")
    @classmethod
    def _check_provenance(cls, fields: dict[str, Any]) -> dict[str, Any]:
        _ProvenanceFields.model_validate(fields)
        return fields

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, fields: Any) -> Any:
        """Refuse options of other families that are on; drop what the head does not use."""
        if not isinstance(fields, dict):
            return fields
        others = fields.keys() - cls.model_fields.keys() - {"schema"}
        for name in sorted(others):
            if fields[name] not in (None, False):
                title = get_family(fields["family"]).title
                raise ValueError(f"{title} heads have no {name}, found {fields[name]!r}")
        fields = {name: value for name, value in fields.items() if name not in others}
        if isinstance(rope := fields.get("rope_parameters"), dict):
            # A target's may have partial_rotary_factor and others that its heads do not use, and
            # that servers would apply.
            return fields | {"rope_parameters": used_rope(rope)}
        return fields

    @model_validator(mode="after")
    def _check(self) -> HeadConfig:
        if self.schema_version != HEAD_SCHEMA:
            raise ValueError(f"expected head schema {HEAD_SCHEMA}, found {self.schema_version}")
        boundaries, possible = list(self.boundaries), range(self.target_num_layers + 1)
        if not boundaries or boundaries != sorted({b for b in boundaries if b in possible}):
            raise ValueError(
                f"expected sorted unique boundaries in 0..{self.target_num_layers}, found "
                f"{boundaries}"
            )
        family = get_family(self.family)
        if self.num_layers > family.max_layers:
            raise ValueError(
                f"{family.title} heads have at most {count_text(family.max_layers, 'layer')}, "
                f"found num_layers {self.num_layers}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key-value heads"
            )

        try:
            rope_frequencies(self.head_dim, self.rope_parameters)
        except KeyError as error:
            raise ValueError(
                f"rope_parameters {self.rope_parameters} lack the key {error}"
            ) from None
        return self

    @property
    def feature_size(self) -> int:
        """Return the width of the features: number of boundaries × target hidden size."""
        return len(self.boundaries) * self.target_hidden_size

    @property
    def kept_by_feed_forward(self) -> int:
        """Return how many numbers a row's feed-forward keeps for the backward pass."""
        return 2 * self.intermediate_size

    @property
    def reads_last(self) -> bool:
        """Return whether the only feature is the last state, which every store holds."""
        return self.boundaries == (self.target_num_layers,)

    @property
    def default_k(self) -> int:
        """Return the drafts a step to evaluate at: those that an imported head's files name, else
        what the head was trained for, at most `USUAL_K`."""
        stated = (self.provenance.get("imported") or {}).get("k")
        return stated if isinstance(stated, int) and stated > 0 else min(self.k_trained, USUAL_K)

    @property
    def validated_positions(self) -> int | None:
        """Return the position below which all positions of the training's validation lie; None: it
        is not known.
        """
        known = _ProvenanceFields.model_validate(self.provenance).validation
        return max((one.stop for one in known.by_position), default=None) if known else None

    def options(self) -> dict[str, Any]:
        """Return the fields that this head's family adds to those of all families."""
        return {k: v for k, v in self if k not in HeadConfig.model_fields}

    def identity(self) -> dict[str, Any]:
        """Return all fields but the provenance; a training checkpoint is tied to them."""
        return self.model_dump(mode="json", exclude={"provenance"})


def make_head_config(**fields: Any) -> HeadConfig:
    """Return a head config of the family that `fields` names, by default an EAGLE3 head's; raise a
    `ValidationError` if they do not describe one, a `UserError` if the family is unknown.
    """
    family = get_family(fields.get("family", "eagle3"))
    return family.config_class().model_validate(fields | {"family": family.name})


def embedding_row_fault(token: int, rows: int) -> str | None:
    """Return why a token has no row in an embedding table of `rows` rows; None if it has one."""
    if 0 <= token < rows:
        return None
    return f"lies outside the {rows} rows of embeddings (ids 0 to {rows - 1})"
