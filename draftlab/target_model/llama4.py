"""Llama 4's attention temperature, computed from the true position of every token.

Layers without RoPE scale their queries by 1 + a · log(1 + ⌊(p + 1) / f⌋), f = 8,192. transformers
derives p from the cache length, one number for all rows, so from position 8,191 on a row's logits
would depend on the other rows of the batch. Here p is the token's position id.
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

from draftlab.target_model.cache import CACHE_NAMES


class PositionedAttention(Llama4TextAttention):
    """Attention without RoPE; it takes positions in place of rotary embeddings."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention as transformers does, except for the scale.

        Args:
            hidden_states: [B, M, H].
            position_embeddings: int64 [B, M] or [1, M], the tokens' positions; −1 (padding) scales
                by 1.
            attention_mask: the attention function's mask.
            kwargs: the KV cache, and what is passed on to the attention function.
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
        caches = [kwargs.pop(name) for name in CACHE_NAMES if name in kwargs]
        cache = next((cache for cache in caches if cache is not None), None)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*shape, -1).contiguous()), weights


class PositionedLayer(Llama4TextDecoderLayer):
    """A layer without RoPE; it passes positions in place of rotary embeddings."""

    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **kwargs: Any) -> Tensor:
        kwargs["position_embeddings"] = position_ids
        return super().forward(hidden_states, position_ids=position_ids, **kwargs)


def use_true_positions(layers: nn.ModuleList) -> None:
    """Change the class of layers whose attention has a temperature, in place.

    Weights, hooks, device maps and `state_dict` do not change.
    """
    for layer in layers:
        attention = layer.self_attn
        if attention.attn_temperature_tuning and not attention.use_rope:
            attention.__class__, layer.__class__ = PositionedAttention, PositionedLayer
