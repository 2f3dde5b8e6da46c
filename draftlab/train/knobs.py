"""What can be set about a head and its training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from draftlab.base import Knobs

FREE_KNOBS = frozenset({"device", "checkpoint_every", "log_every", "validate_every", "wandb"})
"""Knobs of `TrainKnobs` that change how training runs, never what it makes."""


class HeadKnobs(Knobs):
    """Shape of the head; what is None follows the target."""

    family: Literal["eagle3", "ptd"] = "eagle3"
    """eagle3: drafts one token a pass, from its own last. ptd: all K tokens in one pass."""
    num_layers: int = Field(default=1, ge=1, le=4)
    """Decoder layers; more than one for ptd only."""
    intermediate_size: int | None = None
    """Width of the feed-forward; None: the target's."""
    num_attention_heads: int | None = None
    """Query heads; None: the target's."""
    num_key_value_heads: int | None = None
    """Key-value heads; None: the target's."""
    head_dim: int | None = None
    """Width of a head; None: the target's."""
    norm_before_residual: bool = False
    """Whether the residual is the normed hidden state. SGLang cannot serve True."""
    qk_norm: bool = False
    """Whether queries and keys are normed, as in Qwen3."""
    mask_token: int | str = "auto"
    """ptd: token of the masked slots, by name or id; "auto": a mask or reserved token, or an
    embedding that no token has."""
    init: str | None = None
    """Head to start from, such as "reference" or runs/NAME/head; None: from the target's parts."""

    @model_validator(mode="after")
    def _fits_family(self) -> HeadKnobs:
        if self.family == "eagle3" and self.num_layers != 1:
            raise ValueError(f"family eagle3 has num_layers 1, found {self.num_layers}")
        if self.family == "eagle3" and self.mask_token != "auto":
            raise ValueError(f"family eagle3 has no mask_token, found {self.mask_token!r}")
        return self


class TrainKnobs(Knobs):
    """Training-time test of an EAGLE3 head, (anchor, depth) pairs of a parallel one (METHODS)."""

    steps: int = Field(default=1000, ge=1)
    """Optimizer steps."""
    row_tokens: int = Field(default=2048, ge=8)
    """Positions of a packed row; must hold the longest record."""
    batch_rows: int = Field(default=8, ge=1)
    """Packed rows of an optimizer step, over all processes."""
    micro_rows: int | None = Field(default=None, ge=1)
    """Rows of one forward pass; None: all of them. Fewer accumulate, with the same result."""
    ttt_steps: int = Field(default=7, ge=1)
    """Draft length that the head is trained for: unrolled steps, or depths of a parallel head."""
    gamma: float = Field(default=0.8, gt=0, le=1)
    """Weight of step (depth) k is gamma^k."""
    cod_ratio: float = Field(default=0.8, gt=0, le=1)
    """ptd: share of the anchors that keep depth d is cod_ratio^d (conditional drop); 1: all."""
    cod_min: float = Field(default=0.2, ge=0, le=1)
    """ptd: smallest share of the anchors that a depth keeps."""
    anchor_parts: int = Field(default=1, ge=1)
    """Parts that the anchors of a forward pass are dealt to, to run one after the other: less
    memory for long rows, with the same result."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak of the schedule."""
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps with rising learning rate; then a cosine."""
    final_learning_rate: float = Field(default=0.02, ge=0, le=1)
    """End of the cosine, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, on matrices only."""
    beta2: float = Field(default=0.95, gt=0, lt=1)
    """AdamW's second-moment decay."""
    clip: float = Field(default=0.5, gt=0)
    """Largest gradient norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast dtype over float32 weights; "auto": bfloat16 on a GPU, float32 on a CPU."""
    validation_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the records kept out of training; at least one when above 0."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps between validations; None: at the end only."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps between checkpoints."""
    log_every: int = Field(default=10, ge=1)
    """Steps between lines of metrics.jsonl."""
    device: str = "auto"
    """Where to train: "cpu", "cuda", "auto": a GPU when there is one."""
    wandb: str | None = None
    """Project on Weights & Biases; None: off."""
