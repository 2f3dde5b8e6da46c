"""What can be set about a head and its training."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from draftlab.errors import UserError
from draftlab.heads.family import family_names, get_family
from draftlab.settings import Settings

FREE_SETTINGS = frozenset(
    {
        "device",
        "parallel",
        "compile",
        "recompute",
        "checkpoint_every",
        "log_every",
        "data_workers",
        "validate_every",
        "wandb",
    }
)
"""Settings of `TrainSettings` that change how training runs, never what it makes."""


FIRST_NAMES = {"acceptance_weighting": "reach"}
"""Settings of `TrainSettings` that were renamed, with their first names."""


class Llama4Settings(Settings):
    """Attention of an eagle_llama4 head; what is None follows the target, else Llama 4."""

    no_rope_layers: tuple[Literal[0, 1], ...] | None = None
    """For each layer, 1: with RoPE, 0: without; None: every fourth without, as in Llama 4."""
    attention_chunk_size: int | None = Field(default=None, ge=0)
    """Positions that layers with RoPE see at a time; 0: all."""
    use_qk_norm: bool | None = None
    """Whether layers with RoPE norm queries and keys, without weights."""
    attn_temperature_tuning: bool | None = None
    """Whether queries of layers without RoPE grow with their position."""
    floor_scale: int | None = Field(default=None, ge=1)
    """Positions between two steps of that."""
    attn_scale: float | None = None
    """How much a step is."""


class HeadSettings(Settings):
    """Shape of the head; what is None follows the target."""

    family: str = "eagle3"
    """eagle3: drafts one token a pass, each from the head's previous output. peagle (formerly ptd):
    all K tokens in one pass. eagle: the first generation, which imitates the target's last state.
    eagle_llama4: the same with dense Llama 4 layers. Families of other packages can be registered."""
    num_layers: int = Field(default=1, ge=1)
    """Decoder layers: 1 for eagle3, up to 4 for the others."""
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
    norm_before_fc: bool = False
    """eagle3, peagle: whether one norm over all features comes before fc."""
    fc_norm: bool = False
    """eagle3, peagle: whether the features of each boundary are normed before fc."""
    norm_output: bool = False
    """eagle3: whether the normed output is fed back, in place of the output before its norm."""
    qk_norm: bool = False
    """Whether queries and keys are normed, as in Qwen3."""
    llama4: Llama4Settings = Llama4Settings()
    """eagle_llama4: its attention; what is null follows the target, or else Llama 4."""
    mask_token: int | str = "auto"
    """peagle: token of the masked slots, by name or id; "auto": a mask or reserved token, or an
    embedding that no token has."""
    init: str | None = None
    """Head to start from, such as "reference" or runs/NAME/head; None: from the target's parts."""

    @field_validator("family")
    @classmethod
    def _known_family(cls, value: str) -> str:
        try:
            return get_family(value).name  # an alias becomes the name
        except UserError:
            names = " or ".join(map(repr, family_names()))
            raise ValueError(f"expected {names}, found {value!r}") from None

    @model_validator(mode="after")
    def _fits_family(self) -> HeadSettings:
        get_family(self.family).check_settings(self)
        return self

    def chosen_options(self) -> set[str]:
        """Return the names of the settings, beside the shape, that the recipe sets."""
        flags = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm"}
        chosen = {name for name in flags if getattr(self, name)}
        if self.mask_token != "auto":
            chosen.add("mask_token")
        if any(value is not None for _, value in self.llama4):
            chosen.add("llama4")
        return chosen


class TrainSettings(Settings):
    """Training-time test of an EAGLE3 head, (anchor, depth) pairs of a parallel one (methods §2,
    §4)."""

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
    loss: Literal["soft_ce", "lk"] = "soft_ce"
    """soft_ce: cross-entropy to the target's distribution. lk: acceptance too, more of it the
    better a step gets in a forward pass, so that micro_rows and anchor_parts change it a little."""
    regression: float = Field(default=1.0, ge=0)
    """eagle: weight of the imitation of the target's states (smooth L1)."""
    distillation: float = Field(default=0.1, ge=0)
    """eagle: weight of the loss on distributions."""
    noise: float = Field(default=0.1, ge=0)
    """eagle: largest noise on features, times 512 / length of the conversation; 0: none."""
    gamma: float = Field(default=0.8, gt=0, le=1)
    """Weight of step (depth) k is gamma^k."""
    acceptance_weighting: float = Field(default=0.0, ge=0, le=1)
    """Share of a row's weight that is multiplied by the probability that its draft is reached: the
    product of its anchor's α at the steps before."""
    cod_ratio: float = Field(default=0.8, gt=0, le=1)
    """peagle: share of the anchors that keep depth d is cod_ratio^d (conditional drop); 1: all."""
    cod_min: float = Field(default=0.2, ge=0, le=1)
    """peagle: smallest share of the anchors that a depth keeps."""
    anchor_parts: int = Field(default=1, ge=1)
    """Parts that the anchors of a forward pass are dealt to, to run one after the other: less
    memory for long rows, with the same result."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak of the schedule."""
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps with rising learning rate."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How it falls behind them. wsd: it stays at its peak up to the last steps."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """wsd: share of the steps over which it falls."""
    final_learning_rate: float = Field(default=0.02, ge=0, le=1)
    """Its end, as a share of the peak."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, on matrices only."""
    beta2: float = Field(default=0.95, gt=0, lt=1)
    """AdamW's second-moment decay."""
    clip: float = Field(default=0.5, gt=0)
    """Largest gradient norm."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Autocast dtype over float32 weights; "auto": bfloat16 on a GPU, float32 on a CPU."""
    compile: Literal["auto"] | bool = "auto"
    """Whether norms, rotations and gates of a step are compiled (torch.compile); "auto": on a
    GPU. eagle3 and peagle; other families have no use for it."""
    recompute: Literal["auto"] | bool = "auto"
    """Whether steps are computed again in the backward pass in place of being kept: less memory for
    long rows, a third more time; "auto": on a GPU that could not keep them. eagle3 only."""
    validation_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the records kept out of training, all that answer one prompt or none of them; above
    0 at least one prompt's, where there are several."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps between validations; None: at the end only."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps between checkpoints."""
    log_every: int = Field(default=10, ge=1)
    """Steps between lines of metrics.jsonl."""
    device: str = "auto"
    """Where to train: "cpu", "cuda", "cuda:1" …; "auto": a GPU when there is one."""
    parallel: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] = "ddp"
    """What several processes keep: the whole head each (ddp), shards of weights, gradients and
    moments (fsdp2, zero3), of gradients and moments (zero2), or of moments (zero1). zero: by
    DeepSpeed, on two GPUs 1% to 3% slower than the others."""
    data_workers: int | None = Field(default=None, ge=0)
    """Processes that pack batches, of half a gigabyte each; 0: the process that trains packs them.
    None: up to 4 for a GPU, as far as CPU cores and /dev/shm allow; 0 on a CPU."""
    wandb: str | None = None
    """Project on Weights & Biases; None: off."""

    def identity(self) -> dict[str, Any]:
        """Return what a training checkpoint is tied to: all settings that change its weights.

        Renamed settings keep their first name, so that older checkpoints can be continued.
        """
        fields = self.model_dump(exclude=set(FREE_SETTINGS))
        return {FIRST_NAMES.get(name, name): value for name, value in fields.items()}
