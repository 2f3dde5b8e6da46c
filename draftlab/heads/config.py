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
    """Shape, boundaries and conventions of an EAGLE3 head (METHODS §2, CONTRACTS §1.3).

    A boundary b is the state entering layer b of the target (b = number of layers: the state before
    the final norm); `boundary_meaning` says so in the file, because other programs count outputs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(default=HEAD_SCHEMA, alias="schema")
    family: Literal["eagle3"] = "eagle3"
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
    norm_before_residual: bool = False
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
        try:
            rope_frequencies(self.head_dim, self.rope_parameters)
        except KeyError as error:
            raise ValueError(
                f"rope_parameters {self.rope_parameters} lack the key {error}"
            ) from None
        return self

    @property
    def feature_size(self) -> int:
        """Width of the features fed to fc: number of boundaries × target hidden size."""
        return len(self.boundaries) * self.target_hidden_size
