"""draftlab.json: what a head is. The single source of truth for its forward pass."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftlab.heads.layers import rope_frequencies

HEAD_SCHEMA = 1


class TargetIdentity(BaseModel):
    """Which target a head was trained for, by name and by content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    fingerprint: str
    architecture: str
    tokenizer_sha256: str
    template_sha256: str


class HeadConfig(BaseModel):
    """Shape, boundaries and conventions of a head (METHODS §2, §4; CONTRACTS §1.3, §1.5).

    A boundary b is the state entering layer b of the target (b = number of layers: the state before
    the final norm); `boundary_meaning` says so in the file, because other programs count outputs.

    Families: "eagle3" drafts one token a pass; "ptd" drafts all K in one, from slots that hold
    `mask_token_id` and a learned feature, and ships embeddings of its own, since that token's row
    is trained.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(default=HEAD_SCHEMA, alias="schema")
    family: Literal["eagle3", "ptd"] = "eagle3"
    boundaries: tuple[int, ...]
    boundary_meaning: Literal["input-of-layer"] = "input-of-layer"
    target_num_layers: int
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int = Field(default=1, ge=1, le=4)
    norm_before_residual: bool = False
    qk_norm: bool = False
    mask_token_id: int | None = None
    embeddings: Literal["target", "own"] = "target"
    k_trained: int
    target: TargetIdentity
    provenance: dict[str, Any] = {}

    @model_validator(mode="after")
    def _consistent(self) -> HeadConfig:
        if self.schema_version != HEAD_SCHEMA:
            raise ValueError(f"expected head schema {HEAD_SCHEMA}, found {self.schema_version}")
        if list(self.boundaries) != sorted(set(self.boundaries)) or not self.boundaries:
            raise ValueError(f"boundaries must be sorted and unique, found {list(self.boundaries)}")
        if not 0 <= self.boundaries[0] <= self.boundaries[-1] <= self.target_num_layers:
            raise ValueError(
                f"boundaries must lie in 0..{self.target_num_layers}, found {list(self.boundaries)}"
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
        self._check_family()
        try:
            rope_frequencies(self.head_dim, self.rope_parameters)
        except KeyError as error:
            raise ValueError(
                f"rope_parameters {self.rope_parameters} lack the key {error}"
            ) from None
        return self

    def _check_family(self) -> None:
        if self.family == "eagle3":
            if self.num_layers != 1:
                raise ValueError(f"an EAGLE3 head has num_layers 1, found {self.num_layers}")
            if self.mask_token_id is not None:
                raise ValueError(f"an EAGLE3 head has no mask_token_id, found {self.mask_token_id}")
            return
        if self.mask_token_id is None:
            raise ValueError("a PTD head needs mask_token_id, found none")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} lies outside the {self.vocab_size} rows of "
                "the embeddings (vocab_size)"
            )
        if self.embeddings != "own":
            raise ValueError(
                'a PTD head has "embeddings": "own" (the mask token\'s row is trained), found '
                f'"{self.embeddings}"'
            )

    @property
    def feature_size(self) -> int:
        """Width of the features fed to fc: number of boundaries × target hidden size."""
        return len(self.boundaries) * self.target_hidden_size
