"""A head's decode pass on a CPU with prepacked weights; `EagerHead` is the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.engine.eager_head import HeadRunner, PassLayout, Pools
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import RMSNorm
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.cpu_prepacked_linear import (
    PrepackedLinear,
    PrepackedSwiGLU,
    RowNorm,
    why_no_prepacking,
)
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.rope_write import rope_angles
from draftlab.target_model.prepacked_decoder import rotate, rotation_factors


class _Layer:
    """The prepacked products and the norms of a layer."""

    def __init__(self, layer: DecoderLayer) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.input_norm = _norm(layer.input_layernorm)
        self.qkv = PrepackedLinear(torch.cat([p.weight for p in projections]))
        self.q_norm, self.k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
        self.out = PrepackedLinear(attention.o_proj.weight)
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        self.mlp = PrepackedSwiGLU(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)


def _norm(module: nn.Module | None) -> RowNorm | None:
    return RowNorm(module.weight, module.eps) if isinstance(module, RMSNorm) else None


class PrepackedHead(HeadRunner):
    """The decode pass of a head on weights that are prepacked for oneDNN.

    Args:
        head: on a CPU, in float32 or bfloat16. Later changes of its weights have no effect.
    """

    @torch.no_grad()
    def __init__(self, head: DraftHead) -> None:
        self.head, self.embeddings = head, head.embedding_table()
        attention = head.layer.self_attn
        self.head_dim, self.num_kv_heads = attention.head_dim, attention.num_kv_heads
        self.fc, self.lm_head = (
            PrepackedLinear(head.fc.weight),
            PrepackedLinear(head.lm_head.weight),
        )
        self.hidden_norm = _norm(getattr(head.layer, "hidden_norm", None))
        self.norm = _norm(head.norm)
        self.norms_logits = head.logits_norm_weight() is not None
        self.layers = [_Layer(layer) for layer in head.layers]

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether this head's weights can be prepacked."""
        weight = head.fc.weight
        return head.has_fused_passes and why_no_prepacking(weight.device, weight.dtype) is None

    def project_features(self, features: Tensor) -> Tensor:
        if self.head.fc_in_every_pass:
            return self.head.project_features(features)
        return self._fc(self.head.normed_features(features))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_angles(positions, self.head.rope.frequencies, 1.0, self.head.fc.weight.dtype)

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.norm(output) if self.norms_logits else output)
        return logits if out is None else out.copy_(logits)

    def forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor, pools: Pools
    ) -> Tensor:
        shape, num_outputs = tokens.shape, layout.output_positions.shape[1]
        factors = rotation_factors(tuple(half.flatten(0, 1) for half in layout.angles))
        queries = layout.layer_queries(len(self.layers))
        for layer, pool, (counts, positions) in zip(self.layers, pools, queries, strict=True):
            if layer is self.layers[0]:
                x, hidden = self._inputs(tokens, hidden, layout)
            else:
                x = layer.input_norm(hidden)
            heads = layer.qkv(x.flatten(0, 1)).view(tokens.numel(), -1, self.head_dim)
            query_key, value = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = query_key[:, : -self.num_kv_heads], query_key[:, -self.num_kv_heads :]
                query_key = torch.cat([layer.q_norm(query), layer.k_norm(key)], 1)
            query_key = rotate(query_key, factors)
            query, key = query_key[:, : -self.num_kv_heads], query_key[:, -self.num_kv_heads :]
            write_paged(key[None], value[None], *pool, layout.slots)
            query, residual = query.view(*shape, *query.shape[1:]), hidden
            if counts is not None:
                query, residual = (last_rows(t, counts, num_outputs) for t in (query, residual))
            attended = attend_paged(query, *pool, block_table, positions, scale=self.head_dim**-0.5)
            y = layer.out.add_to(residual.flatten(0, 1), attended.flatten(2).flatten(0, 1))
            y = layer.mlp.add_to(y, layer.mlp_norm(y))
            hidden = y.view(*attended.shape[:2], -1)
        return hidden if self.norms_logits or self.norm is None else self.norm(hidden)

    def _fc(self, x: Tensor) -> Tensor:
        """Return fc [B, M, H] of x [B, M, …]."""
        return self.fc(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def _inputs(self, tokens: Tensor, hidden: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Return the first layer's input [B, M, 2H or H] and residual [B, M, H]."""
        if layout.masks is not None:
            hidden = layout.masks.fill(hidden)
        embedding = F.embedding(tokens, self.embeddings)
        if self.hidden_norm is None:  # EAGLE
            residual = self._fc(torch.cat([embedding, hidden], -1))
            return residual, residual
        normed = self.hidden_norm(hidden)
        residual = normed if self.head.config.norm_before_residual else hidden
        return torch.cat([self.layers[0].input_norm(embedding), normed], -1), residual
