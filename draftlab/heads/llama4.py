"""The dense drafter for Llama 4 targets: EAGLE over Llama 4's layers (methods §3; servers §1.2).

As in `heads/eagle.py` the feature is the target's last state after its final norm, and the output
imitates it. Here the first layer keeps its input norm, and the head has a final norm, whose result
the target's lm_head reads and a chain feeds back.

Weights are in Llama 4's layout: RoPE rotates neighbouring pairs (2i, 2i + 1), so that files need no
permutation (vLLM's loader permutes them to half-split pairs for its kernels). A layer with RoPE
attends within chunks and, with `use_qk_norm`, gives queries and keys unit norm. A layer without
RoPE can scale queries by a factor that grows with their position.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import BaseModel, Field, model_validator
from torch import Tensor, nn

from draftlab.heads.eagle import EagleConfig, EagleHead
from draftlab.heads.head import DecoderLayer
from draftlab.heads.layers import Angles, Attention, RMSNorm, Rope, SwiGLU, at_least_float32


class Llama4Config(BaseModel, extra="forbid", frozen=True):
    """Attention options of Llama 4, by their names in its configs (servers §1.2).

    `no_rope_layers` has a number for each layer. Layers with RoPE (1) attend within chunks of
    `attention_chunk_size` positions (None: no chunks) and, with `use_qk_norm`, norm rotated queries
    and keys without weights. With `attn_temperature_tuning`, layers without RoPE (0) multiply
    queries at position p by 1 + attn_scale · log(1 + ⌊(p + 1) / floor_scale⌋).
    """

    no_rope_layers: tuple[Literal[0, 1], ...]
    attention_chunk_size: int | None = Field(ge=1)
    use_qk_norm: bool
    attn_temperature_tuning: bool
    floor_scale: int = Field(gt=0)
    attn_scale: float


class EagleLlama4Config(EagleConfig):
    """draftlab.json of a dense Llama 4 drafter."""

    llama4: Llama4Config

    @model_validator(mode="after")
    def _check_llama4(self) -> EagleLlama4Config:
        if len(self.llama4.no_rope_layers) != self.num_layers:
            raise ValueError(
                f"no_rope_layers has one number for each of the head's {self.num_layers} layers, "
                f"found {list(self.llama4.no_rope_layers)}"
            )
        return self


class Llama4Rope(Rope):
    """Rotary angles, and the query factors of layers without RoPE."""

    def __init__(self, config: EagleLlama4Config) -> None:
        super().__init__(config.head_dim, config.rope_parameters)
        self.floor_scale, self.attn_scale = config.llama4.floor_scale, config.llama4.attn_scale

    def angles(self, positions: Tensor) -> Angles:
        """Return cosines and sines [..., 1, head_dim / 2], and query factors [..., 1, 1]."""
        steps = torch.floor((positions[..., None, None].float() + 1) / self.floor_scale)
        return *super().angles(positions), 1 + self.attn_scale * torch.log1p(steps)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of x [..., heads, head_dim], in float32 or wider."""
    even, odd = at_least_float32(x).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return rotated.flatten(-2).to(x.dtype)


class Llama4Attention(Attention):
    """The projections of layer `number` of the head."""

    def __init__(self, config: EagleLlama4Config, number: int) -> None:
        super().__init__(
            config.hidden_size,
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        options = config.llama4
        self.rotates = bool(options.no_rope_layers[number])
        self.has_unit_norm = options.use_qk_norm and self.rotates
        self.has_temperature = options.attn_temperature_tuning and not self.rotates
        self.eps = config.rms_norm_eps

    def query(self, x: Tensor, angles: Angles) -> Tensor:
        query = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim))
        if self.has_temperature:
            return (at_least_float32(query) * angles[2]).to(query.dtype)
        return self._rotated(query, angles)

    def key_value(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        shape = (self.num_kv_heads, self.head_dim)
        key, value = (project(x).unflatten(-1, shape) for project in (self.k_proj, self.v_proj))
        return self._rotated(key, angles), value

    def _rotated(self, x: Tensor, angles: Angles) -> Tensor:
        if not self.rotates:
            return x
        x = rotate_pairs(x, *angles[:2])
        if not self.has_unit_norm:
            return x
        wide = at_least_float32(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Llama4Layer(DecoderLayer):
    """A dense layer of Llama 4."""

    def __init__(self, config: EagleLlama4Config, number: int) -> None:
        nn.Module.__init__(self)  # its submodules differ from those of its base class
        size = config.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(size, config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn = Llama4Attention(config, number)
        self.chunk = config.llama4.attention_chunk_size if self.self_attn.rotates else None
        self.feed_forward = SwiGLU(size, config.intermediate_size)

    @property
    def mlp(self) -> SwiGLU:
        """Return the feed-forward layer under the name that `DecoderLayer` uses."""
        return self.feed_forward


class EagleLlama4Head(EagleHead):
    """An EAGLE head with layers of Llama 4 and a final norm of its own, `norm` [H]."""

    has_fused_passes = False

    def __init__(self, config: EagleLlama4Config) -> None:
        super().__init__(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Llama4Rope(config)

    @staticmethod
    def new_layers(config: EagleLlama4Config) -> list[DecoderLayer]:
        return [Llama4Layer(config, n) for n in range(config.num_layers)]

    def output_norm(self, output: Tensor) -> Tensor:
        return self.norm(output)

    def normed(self, output: Tensor) -> Tensor:
        return output

    def init_from_target(self, embeddings: Tensor, final_norm: Tensor, lm_head: Tensor) -> None:
        super().init_from_target(embeddings, final_norm, lm_head)
        self.norm.weight.copy_(final_norm)
