"""A target's own MTP layer as a head: the multi-token prediction layer of its checkpoint.

Contract, of one dense layer that drafts K tokens one a pass (vLLM 0.32: `models/mimo_mtp.py`,
`models/qwen3_5_mtp.py`, `v1/spec_decode/llm_base_proposer.py`):

- The pass at position t reads the embedding of x_{t+1} and a state [H], at RoPE position t. The
  state is the target's last one, for MiMo before the target's final norm and for Qwen3.5 after it;
  in later passes it is the layer's own output after its final norm. Every pass norms both and
  projects the two side by side, for MiMo the state first and for Qwen3.5 the embedding first.
- MiMo's layer reads zeros in place of the embedding at position 0.
- A decoder layer of the target's follows: Qwen2's with biases, or Qwen3.5's with full attention,
  whose norms store their weight less 1, whose queries and keys are normed, whose RoPE turns the
  first `rotary_dim` channels of a head, and whose attended values are multiplied by σ(gate).
- Embeddings and lm_head are the target's. The final norm's output enters lm_head as it is.

Tensors have draftlab's names in a head folder and the checkpoint's in an export
(`checkpoint_tensors`); the rows of Qwen3.5's q_proj, which hold queries and gates of each head in
turn, are split into `q_proj` and `gate_proj`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor, nn

from draftlab.errors import UserError
from draftlab.heads.config import HeadDim
from draftlab.heads.eagle import EagleConfig
from draftlab.heads.head import LM_HEAD, TARGET_NORM, DecoderLayer, DraftHead
from draftlab.heads.layers import Attention, RMSNorm, Rope, SwiGLU, at_least_float32

Q_PROJ, GATE = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.gate_proj.weight"


@dataclass(frozen=True)
class MtpType:
    """What one type of checkpoint computes in its layer, and how it names the tensors.

    Attributes:
        names: beginnings of names in a head folder → in the checkpoint.
        count_key: key of the target's text config with the number of MTP layers.
        reads_normed: whether the target's final norm precedes the first pass.
        state_first: whether the state comes before the embedding in the input of fc.
        masks_first: whether the embedding at position 0 is zero.
        has_bias: whether q_proj, k_proj and v_proj have biases.
        is_gated: whether attention has gates, norms of queries and keys, and all norms store their
            weight less 1.
    """

    names: Mapping[str, str]
    count_key: str
    reads_normed: bool
    state_first: bool
    masks_first: bool
    has_bias: bool
    is_gated: bool


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
        has_bias=True,
        is_gated=False,
    ),
    "qwen3_5_text": MtpType(
        names={
            "fc.": "mtp.fc.",
            "embedding_norm.": "mtp.pre_fc_norm_embedding.",
            "state_norm.": "mtp.pre_fc_norm_hidden.",
            "norm.": "mtp.norm.",
            "layers.0.": "mtp.layers.0.",
        },
        count_key="mtp_num_hidden_layers",
        reads_normed=True,
        state_first=False,
        masks_first=False,
        has_bias=False,
        is_gated=True,
    ),
}
"""Types by the `model_type` of the target's text config."""


class MtpConfig(EagleConfig):
    """draftlab.json of an MTP layer.

    Attributes:
        target_type: key of `TYPES`.
        rotary_dim: channels of a head that RoPE turns, the first ones.
    """

    target_type: Literal["mimo", "qwen3_5_text"]
    rotary_dim: HeadDim

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
        attention = Attention(size, size, heads, config.num_key_value_heads, config.head_dim)
        if kind.is_gated:
            attention.gate_proj = nn.Linear(size, heads * config.head_dim, bias=False)
            attention.q_norm, attention.k_norm = (_norm(config, config.head_dim) for _ in "12")
        if kind.has_bias:
            for one in (attention.q_proj, attention.k_proj, attention.v_proj):
                one.bias = nn.Parameter(torch.zeros(one.out_features))
        self.self_attn, self.mlp = attention, SwiGLU(size, config.intermediate_size)

    def inputs(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of attention [..., H], and what `output` takes as the residual."""
        x = self.input_layernorm(residual)
        return x, torch.cat([residual, x], -1) if self.is_gated else residual

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:
        if self.is_gated:
            residual, x = residual.chunk(2, -1)
            gate = torch.sigmoid(self.self_attn.gate_proj(x))
            attended = attended * gate.view(attended.shape)
        return super().output(attended, residual)


class MtpHead(DraftHead):
    """An MTP layer: norms of embedding and state, fc over both, a decoder layer, a final norm.

    Parameters: `lm_head` [V, H] and, where the state is normed before, `target_norm` [H] are the
    target's, frozen and not stored.
    """

    fc_in_every_pass = True
    config: MtpConfig

    def __init__(self, config: MtpConfig) -> None:
        size = config.hidden_size
        super().__init__(config, [MtpLayer(config)], fc_width=2 * size)
        self.type = config.mtp_type
        self.embedding_norm, self.state_norm, self.norm = (_norm(config, size) for _ in "123")
        self.rope = Rope(config.rotary_dim, config.rope_parameters)
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
        return self.norm(output)

    def normed(self, output: Tensor) -> Tensor:
        return output

    def logits_norm_weight(self) -> Tensor | None:
        return None

    def shared_tensors(self) -> frozenset[str]:
        more = {LM_HEAD, TARGET_NORM} if self.type.reads_normed else {LM_HEAD}
        return super().shared_tensors() | more

    def init_from_target(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        self.embed_tokens.weight.copy_(embeddings)
        self.lm_head.weight.copy_(lm_head)
        self.norm.weight.copy_(final_norm - 1 if self.type.is_gated else final_norm)
        if self.type.reads_normed:
            self.target_norm.weight.copy_(final_norm)


def checkpoint_tensors(config: MtpConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a head folder as the checkpoint has them, without computing."""
    tensors = dict(tensors)
    if GATE in tensors:
        shape = (config.num_attention_heads, config.head_dim, config.hidden_size)
        halves = [tensors[Q_PROJ].view(shape), tensors.pop(GATE).view(shape)]
        tensors[Q_PROJ] = torch.cat(halves, 1).flatten(0, 1)
    return {_checkpoint_name(config, name): tensor for name, tensor in tensors.items()}


def layer_of_checkpoint(config: MtpConfig, read: Callable[[str], Tensor]) -> MtpHead:
    """Return the layer of a checkpoint as a float32 head; the target's own tensors are zeros.

    Args:
        read: returns the checkpoint's tensor of a name.

    Raises:
        UserError: a tensor has another shape, or quantised values.
    """
    head, found = MtpHead(config), {}
    head.set_draft_vocabulary(torch.arange(config.vocab_size))
    own = {name: parameter.data for name, parameter in head.named_parameters()}
    for name in head.shared_tensors():  # zeros, so that a resumed training starts from equal values
        own.pop(name).zero_()
    for name in own.keys() - {GATE}:
        stored = _checkpoint_name(config, name)
        found[name], (rows, *width) = read(stored), own[name].shape
        expected = [rows * (1 + (name == Q_PROJ and GATE in own)), *width]
        if [*found[name].shape] != expected or found[name].element_size() < 2:
            raise UserError(
                f"{stored}: expected {expected} floating numbers of 16 bits or more, found "
                f"{[*found[name].shape]} of {found[name].dtype}",
                where="target",
                do="name a checkpoint whose MTP layer is not quantised",
            )
    if GATE in own:
        shape = (config.num_attention_heads, 2, config.head_dim, config.hidden_size)
        halves = found[Q_PROJ].view(shape).unbind(1)
        found[Q_PROJ], found[GATE] = (half.flatten(0, 1) for half in halves)
    for name, tensor in own.items():
        tensor.copy_(found[name])
    return head


def checkpoint_names(config: MtpConfig) -> list[str]:
    """Return the names of the layer's tensors in the checkpoint."""
    with torch.device("meta"):
        head = MtpHead(config)
    own = {name for name, _ in head.named_parameters()} - head.shared_tensors() - {GATE}
    return sorted(_checkpoint_name(config, name) for name in own)


def _checkpoint_name(config: MtpConfig, name: str) -> str:
    names = config.mtp_type.names
    start = next(start for start in names if name.startswith(start))
    return names[start] + name.removeprefix(start)
