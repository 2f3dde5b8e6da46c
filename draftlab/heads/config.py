"""draftlab.json: what a head is. The single source of truth for its forward pass."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, model_validator

HEAD_SCHEMA = 1

FROM_LAST_STATE = frozenset({"eagle", "eagle_llama4"})
"""Families that read the target's last state, and draft with its lm_head, whatever boundaries and
tokens others choose."""


OPTIONS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm")
"""What can be chosen of a head's norms, all of it for EAGLE3 heads."""


class TargetIdentity(BaseModel):
    """Which target a head was trained for, by name and by content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    fingerprint: str
    architecture: str
    tokenizer_sha256: str
    template_sha256: str


class Llama4Config(BaseModel):
    """What is particular to Llama 4's attention, in the names of its configs (servers §1.2).

    Layers with RoPE (1 in `no_rope_layers`, a number for each) see `attention_chunk_size` positions
    at a time (None: all) and norm rotated queries and keys with `use_qk_norm`, without weights.
    With `attn_temperature_tuning` layers without RoPE (0) multiply queries at position p by
    1 + attn_scale · log(1 + ⌊(p + 1) / floor_scale⌋).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    no_rope_layers: tuple[Literal[0, 1], ...]
    attention_chunk_size: int | None = Field(ge=1)
    use_qk_norm: bool
    attn_temperature_tuning: bool
    floor_scale: int = Field(gt=0)
    attn_scale: float


class HeadConfig(BaseModel):
    """Shape, boundaries and conventions of a head (methods §2, §4; servers §1.3, §1.5).

    A boundary b is the state entering layer b of the target (b = number of layers: the state before
    the final norm); `boundary_meaning` says so in the file, because other programs count outputs.

    Families: "eagle3" drafts one token a pass; "eagle", its first generation, too, from the state
    behind the target's final norm, and "eagle_llama4" with Llama 4's layers; "ptd" drafts all K in
    one, from slots that hold `mask_token_id` and a learned feature, and ships embeddings of its
    own, since that token's row is trained.

    `norm_before_fc` norms the features side by side, `fc_norm` each alone; with `norm_output` a
    chain is fed back its normed output; with `norm_before_residual` the first layer's residual is
    the normed hidden state.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(default=HEAD_SCHEMA, alias="schema")
    family: Literal["eagle3", "ptd", "eagle", "eagle_llama4"] = "eagle3"
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
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    llama4: Llama4Config | None = None
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
        from draftlab.heads.layers import rope_frequencies  # torch, which settings do without

        try:
            rope_frequencies(self.head_dim, self.rope_parameters)
        except KeyError as error:
            raise ValueError(
                f"rope_parameters {self.rope_parameters} lack the key {error}"
            ) from None
        return self

    def _check_family(self) -> None:
        if fault := shape_fault(self):
            raise ValueError(fault)
        if (self.llama4 is None) == (self.family == "eagle_llama4"):
            raise ValueError(f"llama4 is for the family eagle_llama4 alone, found {self.family}")
        if self.family == "ptd":
            self._check_masks()
            return
        if self.mask_token_id is not None:
            name = _NAMES[self.family]
            raise ValueError(f"an {name} head has no mask_token_id, found {self.mask_token_id}")
        if self.family in FROM_LAST_STATE:
            self._check_eagle()

    def _check_eagle(self) -> None:
        if self.llama4 is not None and len(self.llama4.no_rope_layers) != self.num_layers:
            raise ValueError(
                f"no_rope_layers has one number for each of the head's {self.num_layers} layers, "
                f"found {list(self.llama4.no_rope_layers)}"
            )
        if self.boundaries != (self.target_num_layers,):
            raise ValueError(
                f"an EAGLE head reads the last state, boundaries [{self.target_num_layers}], found "
                f"{list(self.boundaries)}"
            )
        if self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"an EAGLE head is as wide as its target ({self.target_hidden_size}), whose states "
                f"it imitates; found hidden_size {self.hidden_size}"
            )
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"an EAGLE head drafts with its target's lm_head, all {self.vocab_size} tokens, "
                f"found draft_vocab_size {self.draft_vocab_size}"
            )

    def _check_masks(self) -> None:
        if self.mask_token_id is None:
            raise ValueError("a PTD head needs mask_token_id, found none")
        if fault := row_fault(self.mask_token_id, self.vocab_size):
            raise ValueError(f"mask_token_id {self.mask_token_id} {fault}")
        if self.embeddings != "own":
            raise ValueError(
                'a PTD head has "embeddings": "own" (the mask token\'s row is trained), found '
                f'"{self.embeddings}"'
            )

    @property
    def feature_size(self) -> int:
        """Width of the features fed to fc: number of boundaries × target hidden size."""
        return len(self.boundaries) * self.target_hidden_size

    @property
    def reads_last(self) -> bool:
        """Whether its only feature is the target's last state, which every store holds anyway."""
        return self.boundaries == (self.target_num_layers,)


class Shape(Protocol):
    """What `shape_fault` looks at: a `HeadConfig`, or the settings of a head to be made."""

    family: str
    num_layers: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    qk_norm: bool


def shape_fault(head: Shape) -> str | None:
    """What a head's options contradict, its family or each other; None: nothing."""
    if head.family == "eagle3" and head.num_layers != 1:
        return f"an EAGLE3 head has num_layers 1, found {head.num_layers}"
    if head.norm_before_fc and head.fc_norm:
        return "norm_before_fc and fc_norm exclude each other, found both"
    if head.family == "ptd" and head.norm_output:
        return "a PTD head feeds no output back: norm_output does nothing there"
    found = [name for name in OPTIONS if getattr(head, name)]
    if head.family in FROM_LAST_STATE and found:
        return f"an EAGLE head has no such norms: expected none of {found}"
    return None


def row_fault(token: int, rows: int) -> str | None:
    """What keeps a token from having a row of embeddings of its own; None: nothing."""
    if 0 <= token < rows:
        return None
    return f"lies outside the {rows} rows of embeddings (ids 0 to {rows - 1})"


_NAMES = {"eagle3": "EAGLE3", "eagle": "EAGLE", "eagle_llama4": "EAGLE"}
