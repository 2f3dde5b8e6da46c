"""A target's own MTP layer as a head: the multi-token prediction layer of its checkpoint.

Contract, of one layer that drafts K tokens one a pass (vLLM 0.32: `models/mimo_mtp.py`,
`models/qwen3_5_mtp.py`, `models/qwen3_next_mtp.py`, `models/glm4_moe_mtp.py`,
`models/glm4_moe_lite_mtp.py`, `models/deepseek_mtp.py`, `v1/spec_decode/llm_base_proposer.py`):

- The pass at position t reads the embedding of x_{t+1} and a state [H], at RoPE position t. The
  state is the target's last one, for MiMo before the target's final norm and for the others after
  it; in later passes it is the layer's own output, for GLM's before its final norm and for the
  others after it. Every pass norms both and projects the two side by side, for MiMo the state first
  and for the others the embedding first.
- The layers of MiMo, GLM and DeepSeek read zeros in place of the embedding at position 0.
- A decoder layer of the target's follows: Qwen2's with biases, GLM-4.5's, Qwen3.5's and
  Qwen3-Next's with full attention, whose norms store their weight less 1, whose queries and keys
  are normed, and whose attended values are multiplied by σ(gate), or that of GLM-4.7-Flash and
  DeepSeek-V3 (`heads/latent_attention.py`). RoPE turns the first `rotary_dim` channels of a head.
  The feed-forward is dense or a mixture of experts (`heads/experts.py`).
- Embeddings and lm_head are the target's, which reads the output after the layer's final norm.

Tensors have draftlab's names in a head folder and the checkpoint's in an export
(`heads/mtp_checkpoint.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from draftlab.heads.config import HeadDim
from draftlab.heads.eagle import EagleConfig
from draftlab.heads.experts import Experts, ExpertsConfig
from draftlab.heads.head import LM_HEAD, TARGET_NORM, DecoderLayer, DraftHead
from draftlab.heads.latent_attention import LatentAttention, LatentConfig
from draftlab.heads.layers import Attention, RMSNorm, Rope, SwiGLU, at_least_float32

CORRECTION = "layers.0.mlp.correction"


@dataclass(frozen=True)
class MtpType:
    """What one type of checkpoint computes in its layer, and how it names the tensors.

    Attributes:
        names: beginnings of names in a head folder → in the checkpoint.
        count_key: key of the target's text config with the number of MTP layers.
        reads_normed: whether the target's final norm precedes the first pass.
        returns_normed: whether later passes read the output after the layer's final norm.
        state_first: whether the state comes before the embedding in the input of fc.
        masks_first: whether the embedding at position 0 is zero.
        is_gated: whether attention has gates, norms of queries and keys, and all norms store their
            weight less 1.
    """

    names: Mapping[str, str]
    count_key: str
    reads_normed: bool = True
    returns_normed: bool = True
    state_first: bool = False
    masks_first: bool = False
    is_gated: bool = False
    has_experts: bool = False
    is_latent: bool = False


_EXPERTS = {
    "layers.0.mlp.router.": "gate.",
    "layers.0.mlp.gate_up": "experts.gate_up_proj",
    "layers.0.mlp.down": "experts.down_proj",
    "layers.0.mlp.shared_gate.": "shared_expert_gate.",
    "layers.0.mlp.shared.": "shared_expert.",
}
_QWEN = MtpType(
    names={
        "fc.": "mtp.fc.",
        "embedding_norm.": "mtp.pre_fc_norm_embedding.",
        "state_norm.": "mtp.pre_fc_norm_hidden.",
        "norm.": "mtp.norm.",
        "layers.0.": "mtp.layers.0.",
    },
    count_key="mtp_num_hidden_layers",
    is_gated=True,
)
_QWEN_EXPERTS = replace(
    _QWEN,
    names={name: f"mtp.layers.0.mlp.{x}" for name, x in _EXPERTS.items()} | {**_QWEN.names},
    has_experts=True,
)
_GLM = "model.layers.{layer}."
_GLM_TYPE = MtpType(
    names={name: f"{_GLM}mlp.{x}" for name, x in _EXPERTS.items()}
    | {
        "layers.0.mlp.shared.": f"{_GLM}mlp.shared_experts.",
        "fc.": f"{_GLM}eh_proj.",
        "embedding_norm.": f"{_GLM}enorm.",
        "state_norm.": f"{_GLM}hnorm.",
        "norm.": f"{_GLM}shared_head.norm.",
        CORRECTION: f"{_GLM}mlp.gate.e_score_correction_bias",
        "layers.0.": _GLM,
    },
    count_key="num_nextn_predict_layers",
    returns_normed=False,
    masks_first=True,
    has_experts=True,
)
TYPES = {
    "mimo": MtpType(
        names={
            "fc.": "model.mtp_layers.0.input_proj.",
            "embedding_norm.": "model.mtp_layers.0.token_layernorm.",
            "state_norm.": "model.mtp_layers.0.hidden_layernorm.",
            "norm.": "model.mtp_layers.0.final_layernorm.",
            "layers.0.": "model.mtp_layers.0.",
        },
        count_key="num_nextn_predict_layers",
        reads_normed=False,
        state_first=True,
        masks_first=True,
    ),
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe_text": _QWEN_EXPERTS,
    "qwen3_next": replace(_QWEN_EXPERTS, count_key="num_nextn_predict_layers"),
    "glm4_moe": _GLM_TYPE,
    "glm4_moe_lite": replace(_GLM_TYPE, is_latent=True),
    "deepseek_v3": replace(_GLM_TYPE, is_latent=True, returns_normed=True),
}
"""Types by the `model_type` of the target's text config."""


class MtpConfig(EagleConfig):
    """draftlab.json of an MTP layer.

    Attributes:
        rotary_dim: channels of a head that RoPE turns, the first ones.
        qkv_bias: whether q_proj, k_proj and v_proj have biases.
        qk_norm: whether queries and keys are normed.
        experts: of the feed-forward; None: it is dense.
        latent: sizes of latent attention; None: attention is plain.
    """

    target_type: Literal[*TYPES]
    rotary_dim: HeadDim
    qkv_bias: bool
    qk_norm: bool
    experts: ExpertsConfig | None = None
    latent: LatentConfig | None = None

    @property
    def kept_by_feed_forward(self) -> int:
        if self.experts is None:
            return super().kept_by_feed_forward
        return 2 * self.experts.shared_size + 2 * (
            self.hidden_size * self.experts.per_token + self.experts.width_of_token
        )  # rows are copied for each expert of a token

    @property
    def mtp_type(self) -> MtpType:
        """Return what this type of checkpoint computes."""
        return TYPES[self.target_type]

    @model_validator(mode="after")
    def _check_mtp(self) -> MtpConfig:
        if self.rotary_dim > self.head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} exceeds the head_dim {self.head_dim} of attention"
            )
        found = self.experts is not None, self.latent is not None
        if found != (self.mtp_type.has_experts, self.mtp_type.is_latent):
            raise ValueError(f"experts and latent do not fit the target_type {self.target_type}")
        if self.latent is not None:
            size, turning = self.latent.head_dim, self.latent.rope_size
            if self.qkv_bias or self.qk_norm:
                raise ValueError("expected latent attention without qkv_bias and qk_norm")
            shape = self.head_dim, self.rotary_dim, self.num_key_value_heads
            if shape != (size, turning, self.num_attention_heads):
                raise ValueError(
                    f"expected head_dim {size}, rotary_dim {turning} and as many key-value heads "
                    f"as heads with this latent attention, found {shape}"
                )
        return self


class ZeroCentredNorm(RMSNorm):
    """An RMS norm whose stored weight is its factor less 1, computed in float32 or wider."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + at_least_float32(self.weight)
        return F.rms_norm(at_least_float32(x), factor.shape, factor, self.eps).to(x.dtype)


def _norm(config: MtpConfig, size: int) -> RMSNorm:
    """Return a norm of the layer's kind over `size` channels."""
    kind = ZeroCentredNorm if config.mtp_type.is_gated else RMSNorm
    return kind(size, config.rms_norm_eps)


class MtpLayer(DecoderLayer):
    """The target's kind of decoder layer. With gates the residual carries the attention's input,
    side by side [..., 2H], since the gates are computed from it."""

    def __init__(self, config: MtpConfig) -> None:
        nn.Module.__init__(self)  # its submodules differ from those of its base class
        size, heads, kind = config.hidden_size, config.num_attention_heads, config.mtp_type
        self.is_gated = kind.is_gated
        self.input_layernorm, self.post_attention_layernorm = (_norm(config, size) for _ in "12")
        if config.latent is not None:
            attention = LatentAttention(size, heads, config.latent, config.rms_norm_eps)
        else:
            attention = Attention(size, size, heads, config.num_key_value_heads, config.head_dim)
        self.value_size = config.latent and config.latent.value_size
        if kind.is_gated:
            attention.gate_proj = nn.Linear(size, heads * config.head_dim, bias=False)
        if config.qk_norm:
            attention.q_norm, attention.k_norm = (_norm(config, config.head_dim) for _ in "12")
        if config.qkv_bias:
            for one in (attention.q_proj, attention.k_proj, attention.v_proj):
                one.bias = nn.Parameter(torch.zeros(one.out_features))
        self.self_attn, experts = attention, config.experts
        self.mlp = Experts(size, experts) if experts else SwiGLU(size, config.intermediate_size)

    def inputs(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [..., H], and what `output` takes as the residual."""
        x = self.input_layernorm(residual)
        return x, torch.cat([residual, x], -1) if self.is_gated else residual

    def multiplications(self) -> int:
        count = super().multiplications()
        if isinstance(self.mlp, Experts):
            count += 3 * self.mlp.config.width_of_token * self.self_attn.o_proj.out_features
        return count

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        if self.is_gated:
            residual, x = residual.chunk(2, -1)
            gate = torch.sigmoid(self.self_attn.gate_proj(x))
            attended = attended * gate.view(attended.shape)
        return super().output(attended[..., : self.value_size], residual)


class MtpHead(DraftHead):
    """An MTP layer: norms of embedding and state, fc over both, a decoder layer, a final norm. The
    target's `lm_head` and, where the state is normed before, `target_norm` are frozen.
    """

    fc_in_every_pass = True
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        size = config.hidden_size
        super().__init__(config, [MtpLayer(config)], fc_width=2 * size)
        self.type = config.mtp_type
        self.embedding_norm, self.state_norm, self.norm = (_norm(config, size) for _ in "123")
        self.rope = Rope(config.rotary_dim, config.rope_parameters)
        if config.latent is not None and config.latent.score_factor != 1:
            self.rope.scaling = 1.0  # the factor of the scores contains it
        self.lm_head.requires_grad_(False)
        if self.type.reads_normed:
            self.target_norm = RMSNorm(size, config.rms_norm_eps)
            self.target_norm.requires_grad_(False)

    def embed_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        embedding = self.embed(tokens)
        if not self.type.masks_first:
            return embedding
        return embedding.masked_fill((positions == 0)[..., None], 0)

    def project_features(self, features: Tensor) -> Tensor:
        return self.target_norm(features) if self.type.reads_normed else features

    def layer_inputs(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        pair = [self.embedding_norm(embedding), self.state_norm(hidden)]
        pair = pair[::-1] if self.type.state_first else pair
        return self.layer.inputs(self.fc(torch.cat(pair, -1)))

    def output_norm(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.type.returns_normed else output

    def normed(self, output: Tensor) -> Tensor:
        return output if self.type.returns_normed else self.norm(output)

    def logits_norm_weight(self) -> Tensor | None:
        return None if self.type.returns_normed else self.norm.weight

    def shared_tensors(self) -> frozenset[str]:
        more = {LM_HEAD, TARGET_NORM} if self.type.reads_normed else {LM_HEAD}
        return super().shared_tensors() | more

    def init_from_target(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        self.embed_tokens.weight.copy_(embeddings)
        self.lm_head.weight.copy_(lm_head)
        self.norm.weight.copy_(final_norm - 1 if self.type.is_gated else final_norm)
        if self.type.reads_normed:
            self.target_norm.weight.copy_(final_norm)

    def initialise_extra(self, generator: torch.Generator) -> None:
        for experts in (m for m in self.modules() if isinstance(m, Experts)):
            for parameter, share in ((experts.gate_up, 1.0), (experts.down, 0.5)):
                for one in parameter:  # all at once would take the memory of two more heads
                    noise = torch.randn(one.shape, generator=generator)
                    one.copy_(noise * (share / one.shape[-1]) ** 0.5)
