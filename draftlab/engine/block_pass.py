"""A block head's decode passes over paged KV caches: in its modules, and in fused kernels.

Context vectors give keys and values alone. A block's slots write theirs and attend to the context
and to each other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.eager_head import Pools
from draftlab.engine.fused_head import is_on_gpu_in_one_dtype
from draftlab.heads.block import BlockConfig, BlockHead
from draftlab.kernels.linear import linear, linear_then_norm
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.rope_write import rope_angles, rope_write
from draftlab.target_model.fused_decoder import FusedLayer
from draftlab.target_model.known_layers import LayerWeights


class EagerBlock:
    """The passes in the head's own modules: any device, any dtype."""

    def __init__(self, head: BlockHead) -> None:
        self.head = head

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, pools: Pools
    ) -> None:
        """Write the context keys and values of features [B, M, F] to each layer's pool.

        Args:
            positions: int64 [B, M]; −1 is padding.
            slots: int64 [B, M], of the cache; −1 writes nothing.
        """
        context = self.head.project_features(features)
        angles = self._angles(positions)
        for layer, pool in zip(self.head.layers, pools, strict=True):
            write_paged(*layer.self_attn.key_value(context, angles), *pool, slots)

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pools: Pools
    ) -> Tensor:
        """Return the outputs [B, S, H] of blocks, whose keys and values are written to the pools.

        Args:
            tokens: int64 [B, S], of S slots.
            positions, slots: int64 [B, S], as in `write_context`; padding comes last.
            block_table: int32 [B, N].
        """
        hidden, angles = self.head.embed(tokens), self._angles(positions)
        seen, windows = last_seen_keys(positions, self.head.config), self.head.config.windows
        for layer, pool, window in zip(self.head.layers, pools, windows, strict=True):
            x = layer.input_layernorm(hidden)
            write_paged(*layer.self_attn.key_value(x, angles), *pool, slots)
            query = layer.self_attn.query(x, angles)
            scale = query.shape[-1] ** -0.5
            options = {"scale": scale, "window": window, "last_seen": seen}
            attended = attend_paged(query, *pool, block_table, positions, **options)
            hidden = layer.output(attended, hidden)
        return hidden

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits [..., D], without a Markov bias, of outputs [..., H]."""
        return F.linear(self.head.normed(outputs), self.head.lm_head.weight)

    def confidence(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Return the confidence head's logits [B] of outputs [B, H] after tokens `previous` [B]."""
        factors = self.head.markov_factors(previous)
        return self.head.confidence_logits(self.head.normed(outputs), factors)

    def add_markov_bias_(self, logits: Tensor, previous: Tensor) -> None:
        """Add the bias by the tokens `previous` [B] to logits [B, D] in place."""
        weight = self.head.markov_head.markov_w2.weight
        logits.addmm_(self.head.markov_factors(previous), weight.t())

    def _angles(self, positions: Tensor) -> tuple[Tensor, ...]:
        return self.head.rope.angles(positions.clamp(min=0))


class FusedBlock(EagerBlock):
    """The passes in the kernels of `FusedHead` (CUDA).

    The context keys and values of all layers are one product.

    Args:
        head: on CUDA, in one dtype.
    """

    @torch.no_grad()
    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self.embeddings, self.eps = head.embedding_table(), head.config.rms_norm_eps
        scale = head.config.head_dim**-0.5
        norms = [layer.input_layernorm.weight for layer in head.layers]
        self.first_norm = norms[0]
        self.layers = [
            FusedLayer(LayerWeights(layer), self.eps, scale, window=window, next_norm=next_norm)
            for layer, window, next_norm in zip(
                head.layers, head.config.windows, [*norms[1:], None], strict=True
            )
        ]
        attentions = [layer.self_attn for layer in head.layers]
        self.context_weight = torch.cat(
            [p.weight for attention in attentions for p in (attention.k_proj, attention.v_proj)]
        )

    @staticmethod
    def supports(head: BlockHead) -> bool:
        """Return whether the fused kernels compute this head."""
        return is_on_gpu_in_one_dtype(head)

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, pools: Pools
    ) -> None:
        rows = features.flatten(0, 1)
        _, context = linear_then_norm(
            rows, self.head.fc.weight, self.head.hidden_norm.weight, self.eps
        )
        key_values = linear(context, self.context_weight).chunk(len(self.layers), 1)
        angles, slots = self._angles(positions), slots.flatten()
        for layer, pool, key_value in zip(self.layers, pools, key_values, strict=True):
            w = layer.weights
            norms = {"q_norm": w.q_norm, "k_norm": w.k_norm, "eps": self.eps}
            rope_write(key_value, angles, *pool, slots, **norms)

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pools: Pools
    ) -> Tensor:
        shape, slots, angles = tokens.shape, slots.flatten(), self._angles(positions)
        hidden = x = F.embedding(tokens.flatten(), self.embeddings)
        norm_weight: Tensor | None = self.first_norm
        seen = last_seen_keys(positions, self.head.config)
        for layer, pool in zip(self.layers, pools, strict=True):
            query = layer.write_cache(x, angles, pool, slots, norm_weight=norm_weight)
            query = query.unflatten(0, shape)
            hidden, x = layer.output(query, hidden, pool, block_table, positions, seen)
            norm_weight = None  # the feed-forward has begun the next norm
        return hidden.unflatten(0, shape)

    def logits(self, outputs: Tensor) -> Tensor:
        rows = outputs.flatten(0, -2)
        norm = {"norm_weight": self.head.norm.weight, "eps": self.eps}
        return linear(rows, self.head.lm_head.weight, **norm).unflatten(0, outputs.shape[:-1])

    def add_markov_bias_(self, logits: Tensor, previous: Tensor) -> None:
        factors = F.embedding(previous, self.head.markov_head.markov_w1.weight)
        linear(factors, self.head.markov_head.markov_w2.weight, residual=logits, out=logits)

    def _angles(self, positions: Tensor) -> tuple[Tensor, ...]:
        rope, dtype = self.head.rope, self.head.fc.weight.dtype
        return rope_angles(positions.flatten(), rope.frequencies, rope.scaling, dtype)


def last_seen_keys(positions: Tensor, config: BlockConfig) -> Tensor | None:
    """Return the position of the last key that each slot sees, int64 [B, S]; None: its own.

    Args:
        positions: int64 [B, S], of the slots; −1 is padding.
    """
    if config.is_causal:
        return None
    return positions.amax(1, keepdim=True).where(positions >= 0, -1)
