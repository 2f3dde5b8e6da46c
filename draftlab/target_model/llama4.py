"""Llama 4: the temperature of layers without RoPE, from the true position of every token.

Those layers scale their queries by 1 + a · log(1 + ⌊(p + 1) / f⌋), f = 8,192. transformers counts p
from the length of the cache, one number for all rows, so from position 8,191 on a row's logits
would depend on the rows beside it. Here p is the position that the model is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import (
    Llama4TextAttention,
    Llama4TextDecoderLayer,
    eager_attention_forward,
)


class PositionedAttention(Llama4TextAttention):
    """Attention without RoPE; where others take rotary embeddings, it takes positions."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As in transformers, but for the scale.

        Args:
            hidden_states: [B, M, H].
            position_embeddings: int64 [B, M] or [1, M], the tokens' positions; −1 (padding) scales
                by 1.
            attention_mask: whatever the attention function takes.
            past_key_values: the cache.
            kwargs: passed on to the attention function.
        """
        shape = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*shape, -1, self.head_dim)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        steps = torch.floor((position_embeddings.float() + 1.0) / self.floor_scale)
        scale = torch.log1p(steps) * self.attn_scale + 1.0
        query = (query * scale[..., None, None]).to(query.dtype).transpose(1, 2)
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights


class PositionedLayer(Llama4TextDecoderLayer):
    """A layer without RoPE: it has no use for rotary embeddings and hands on positions instead."""

    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **kwargs: Any) -> Tensor:
        kwargs["position_embeddings"] = position_ids
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)


def position_layers(layers: nn.ModuleList) -> None:
    """Replaces the layers whose attention has a temperature, in place; weights stay where they are.

    A subclass takes over the instance, so that hooks, device maps and `state_dict` are untouched.
    """
    for layer in layers:
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.__class__, layer.__class__ = PositionedAttention, PositionedLayer
