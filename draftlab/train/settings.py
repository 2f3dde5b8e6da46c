"""Settings of the recipe's sections head: and train:."""

from __future__ import annotations

from collections.abc import Mapping
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
        "checkpoint_every",
        "log_every",
        "data_workers",
        "wandb",
        "tensorboard",
        "validate_every",
        "validation_records",
    }
)
"""Settings of `TrainSettings` that change how training runs, but not the trained weights."""
PASS_SETTINGS = frozenset({"micro_rows", "anchor_parts"})
"""Settings that split an optimizer step into passes. Denominators are those of the whole step, so
that only the loss lk, which reads the α of a pass, depends on them."""


class Llama4Settings(Settings):
    """Attention of an eagle_llama4 head, which has the target's values where it has them, else
    Llama 4's."""

    no_rope_layers: tuple[Literal[0, 1], ...] | None = None
    """For each layer 1 (RoPE) or 0 (no RoPE); None: every fourth has no RoPE, as in Llama 4."""


class HeadSettings(Settings):
    """Shape of the head; None: the target's value."""

    family: str = "eagle3"
    """Family of the head. eagle3: drafts one token a pass, each from the head's previous output.
    peagle: drafts all K tokens in one pass. dspark: drafts a block in one pass, with
    a bias by the token before each draft. dflash: a block without that bias. dflash2: a block
    with convolutions, whose drafts are chosen among few tokens. eagle: the first
    generation, which imitates the target's last state. eagle_llama4: eagle with dense Llama 4
    layers. mtp: the layer for multi-token prediction in the target's own checkpoint, which MiMo,
    Qwen 3.5, Qwen 3-Next, GLM-4 (with experts) and DeepSeek-V3 models have. Installed packages can
    register more families."""
    num_layers: int = Field(default=1, ge=1)
    """Number of decoder layers: 1 for eagle3 and mtp, up to 5 for dspark, dflash and dflash2, up to
    4 for others."""
    intermediate_size: int | None = Field(default=None, ge=1)
    """Width of the feed-forward layer; None: the target's."""
    num_attention_heads: int | None = Field(default=None, ge=1)
    """Number of query heads; None: the target's."""
    num_key_value_heads: int | None = Field(default=None, ge=1)
    """Number of key-value heads; None: the target's."""
    head_dim: int | None = Field(default=None, ge=1)
    """Width of an attention head; None: the target's."""
    norm_before_residual: bool | None = None
    """Whether the residual is the normed hidden state. None: that of head.init; else true for
    eagle3, whose AL it raises, unless export.formats names sglang, which cannot serve it."""
    norm_before_fc: bool = False
    """eagle3, peagle: whether one RMS norm over all features precedes fc."""
    fc_norm: bool = False
    """eagle3, peagle: whether each boundary's features have an RMS norm of their own before fc."""
    norm_output: bool = False
    """eagle3: whether the output is fed back after its norm instead of before it."""
    qk_norm: bool = False
    """Whether queries and keys are normed, as in Qwen3."""
    llama4: Llama4Settings = Llama4Settings()
    """eagle_llama4: settings of its attention."""
    markov_rank: int = Field(default=256, ge=1)
    """dspark: rank of the bias by the token before each draft."""
    selector_rank: int = Field(default=256, ge=1)
    """dflash2: rank of the selector's scores by the token before each draft."""
    is_causal: bool = False
    """dspark, dflash, dflash2: whether a slot of a block sees only itself and the slots before."""
    sliding_window: int | None = Field(default=None, ge=2)
    """eagle3, dspark, dflash, dflash2: number of keys that a position sees up to its own, more than
    drafts or slots of a block; None: all. A long context then costs less, and positions beyond
    the trained ones hurt less."""
    mask_token: int | str = "auto"
    """peagle, dspark, dflash, dflash2: token of the masked slots, by name or id; "auto": a mask or
    reserved token, or a row of the embeddings that no token uses."""
    init: str | None = None
    """Trained head to start from, such as "reference" or runs/NAME/head; None: start from the
    target's embeddings, final norm and lm_head."""

    @field_validator("family")
    @classmethod
    def _known_family(cls, value: str) -> str:
        try:
            return get_family(value).name
        except UserError:
            names = " or ".join(map(repr, family_names()))
            raise ValueError(f"expected {names}, found {value!r}") from None

    @model_validator(mode="after")
    def _fits_family(self) -> HeadSettings:
        get_family(self.family).check_settings(self)
        return self

    def chosen_options(self) -> set[str]:
        """Return the names of the settings beside the shape that the recipe sets."""
        flags = {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "qk_norm"}
        chosen = {name for name in flags if getattr(self, name)}
        defaults = HeadSettings.model_fields
        for name in ("mask_token", "markov_rank", "selector_rank", "is_causal", "sliding_window"):
            if getattr(self, name) != defaults[name].default:
                chosen.add(name)
        if any(value is not None for _, value in self.llama4):
            chosen.add("llama4")
        return chosen


class TrainSettings(Settings):
    """Training: training-time test of chains, (anchor, depth) pairs of parallel heads (methods §2,
    §4)."""

    steps: int = Field(default=1000, ge=1, le=100_000_000)
    """Number of optimizer steps."""
    row_tokens: int = Field(default=2048, ge=8)
    """Positions of a packed row; the longest record must fit."""
    batch_rows: int = Field(default=8, ge=1)
    """Packed rows of an optimizer step, summed over all processes."""
    micro_rows: int | None = Field(default=None, ge=1)
    """Most rows of one forward pass; None: all. With fewer, gradients accumulate to the same
    result. Several processes take fewer if more of them then have work."""
    ttt_steps: int = Field(default=7, ge=1, le=64)
    """Draft length that the head is trained for: unrolled steps, or depths of a parallel head."""
    loss: Literal["soft_ce", "lk"] = "soft_ce"
    """soft_ce: cross-entropy to the target's distribution. lk: a mix with the acceptance rate,
    whose share grows with a step's mean acceptance in the forward pass, so that micro_rows and
    anchor_parts change it a little. dspark and dflash have losses of their own."""
    distillation: float = Field(default=0.1, ge=0)
    """eagle: weight of the loss on tokens; that of a smooth L1 to the target's states is 1."""
    noise: float = Field(default=0.1, ge=0)
    """eagle: largest noise on features, multiplied by 512 / conversation length; 0: none."""
    gamma: float = Field(default=0.8, gt=0, le=1)
    """Base of the step weights: step or depth k has weight gamma^k."""
    acceptance_weighting: float = Field(default=0.0, ge=0, le=1)
    """Share of a row's weight that is multiplied by the probability that its draft is reached: the
    product of its anchor's α at the steps before."""
    cod_ratio: float = Field(default=0.8, gt=0, le=1)
    """peagle: share of the anchors that keep depth d is cod_ratio^d (conditional drop); 1: all."""
    cod_min: float = Field(default=0.2, ge=0, le=1)
    """peagle: smallest share of the anchors that a depth keeps."""
    anchor_share: float = Field(default=0.25, gt=0, le=1)
    """dspark, dflash: share of the positions at which a block starts, chosen anew in every step."""
    anchor_parts: int = Field(default=1, ge=1)
    """Number of parts that the anchors of a forward pass are split into. The parts run one after
    the other, which needs less memory for long rows and gives the same result."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: Muon for the matrices of fc and of the layers, AdamW for the rest. Muon needs
    fewer steps. It takes whole matrices, so that `parallel` must be ddp or fsdp2."""
    learning_rate: float = Field(default=1e-3, gt=0, le=10)
    """Peak learning rate of the schedule."""
    adamw_learning_rate: float | None = Field(default=None, gt=0, le=10)
    """muon: peak learning rate of what AdamW steps; None: learning_rate."""
    warmup: float = Field(default=0.04, ge=0, lt=1)
    """Share of the steps in which the learning rate rises."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Shape of the learning rate after warmup. cosine: it falls steadily. wsd: it stays at the peak
    until the last steps (`decay`)."""
    decay: float = Field(default=0.2, gt=0, le=1)
    """Share of the steps, at the end, in which wsd's learning rate falls, and fp8 is bfloat16."""
    final_learning_rate: float = Field(default=0.02, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    clip: float = Field(default=0.5, gt=0)
    """Gradient norm above which gradients are clipped."""
    precision: Literal["auto", "float32", "bfloat16", "fp8"] = "auto"
    """Autocast dtype over float32 weights; "auto": bfloat16 on a GPU, float32 on a CPU. fp8: layers
    and a trained lm_head multiply in 8 bits before the last steps (`decay`), as GPUs from Hopper on
    do; on eagle and eagle_llama4: bfloat16."""
    compile: Literal["auto"] | bool = "auto"
    """Whether norms and rotations are compiled (torch.compile); "auto": on a GPU.
    It has no effect on eagle and eagle_llama4."""
    validation_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of the records held out for validation. Records of one prompt stay together. Above 0,
    at least one prompt is held out if there are several."""
    validation_records: int = Field(default=2000, ge=1)
    """Most records that a validation reads: of more held-out records, those whose ids have the
    smallest SHA-256. A smaller validation_share leaves more records to train on."""
    validate_every: int | None = Field(default=None, ge=1)
    """Steps between validations; None: only at the end. train/best/ has the best one's head."""
    checkpoint_every: int = Field(default=500, ge=1)
    """Steps between checkpoints."""
    log_every: int = Field(default=10, ge=1)
    """Steps between lines of metrics.jsonl."""
    device: str = "auto"
    """Device to train on: "cpu", "cuda", "cuda:1" …; "auto": a GPU if there is one."""
    parallel: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] = "ddp"
    """What several processes shard: nothing (ddp); weights, gradients and moments (fsdp2, zero3);
    gradients and moments (zero2); or moments (zero1). zero1 to zero3 run DeepSpeed, which is 1% to
    3% slower on two GPUs than the others."""
    data_workers: int | None = Field(default=None, ge=0)
    """Number of data loader processes, which need half a gigabyte each; 0: threads of the training
    process. None: up to 4 for a GPU, since threads would delay its kernel launches; 0 on a CPU."""
    wandb: str | None = None
    """Weights & Biases project to log to; None: no logging there."""
    tensorboard: bool = False
    """Whether train/tensorboard/ has event files for TensorBoard."""

    @model_validator(mode="after")
    def _settings_fit(self) -> TrainSettings:
        if self.validate_every and not self.validation_share:
            raise ValueError(
                "validate_every validates on held-out records: expected a validation_share above 0"
            )
        if self.optimizer == "muon" and self.parallel.startswith("zero"):
            raise ValueError(
                f"optimizer=muon takes whole matrices, which DeepSpeed splits: expected parallel "
                f"ddp or fsdp2, found {self.parallel}"
            )
        if self.adamw_learning_rate and self.optimizer == "adamw":
            raise ValueError("adamw_learning_rate is for optimizer=muon: set learning_rate instead")
        return self

    @property
    def decay_steps(self) -> int:
        """Return how many of the last steps `decay` covers, at least one."""
        return max(1, round(self.decay * self.steps))

    def identity(self) -> dict[str, Any]:
        """Return all settings that change the weights; a training checkpoint is tied to them."""
        settings = self.model_dump()
        return {name: value for name, value in settings.items() if not is_free(name, settings)}


def is_free(name: str, settings: Mapping[str, Any]) -> bool:
    """Return whether a setting of `TrainSettings` changes no trained weights beside the others."""
    if name in PASS_SETTINGS:
        return settings.get("loss") != "lk"
    return name in FREE_SETTINGS
