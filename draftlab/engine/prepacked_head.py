"""A head's decode pass on a CPU with packed products; `PlainHead` is the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftlab.engine.eager_head import Pass, Pools
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
    """A layer's packed products, and its norms."""

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


class PackedHead:
    """The passes of a head, with the interface of `HeadPasses`.

    Args:
        head: on a CPU, float32 or bfloat16; changes of its weights are not seen.
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
    def suits(head: DraftHead) -> bool:
        """Whether a head's passes can run so."""
        weight = head.fc.weight
        return head.has_fused_passes and why_no_prepacking(weight.device, weight.dtype) is None

    def project_features(self, features: Tensor) -> Tensor:
        """See `HeadPasses`."""
        if self.head.fc_in_every_pass:
            return self.head.project_features(features)
        return self._fc(self.head.normed_features(features))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See `HeadPasses`."""
        return rope_angles(positions, self.head.rope.frequencies, 1.0, self.head.fc.weight.dtype)

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See `HeadPasses`."""
        found = self.lm_head(self.norm(output) if self.norms_logits else output)
        return found if out is None else out.copy_(found)

    def forward(
        self, tokens: Tensor, hidden: Tensor, place: Pass, block_table: Tensor, pools: Pools
    ) -> Tensor:
        """See `HeadPasses`."""
        shape, asked = tokens.shape, place.asked.shape[1]
        turn = rotation_factors(tuple(half.flatten(0, 1) for half in place.angles))
        parts = place.parts(len(self.layers))
        for layer, pool, (counts, positions) in zip(self.layers, pools, parts, strict=True):
            if layer is self.layers[0]:
                x, hidden = self._inputs(tokens, hidden, place)
            else:
                x = layer.input_norm(hidden)
            heads = layer.qkv(x.flatten(0, 1)).view(tokens.numel(), -1, self.head_dim)
            turned, value = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
            if layer.q_norm is not None and layer.k_norm is not None:
                query, key = turned[:, : -self.num_kv_heads], turned[:, -self.num_kv_heads :]
                turned = torch.cat([layer.q_norm(query), layer.k_norm(key)], 1)
            turned = rotate(turned, turn)
            query, key = turned[:, : -self.num_kv_heads], turned[:, -self.num_kv_heads :]
            write_paged(key[None], value[None], *pool, place.slots)
            query, residual = query.view(*shape, *query.shape[1:]), hidden
            if counts is not None:
                query, residual = (last_rows(t, counts, asked) for t in (query, residual))
            attended = attend_paged(query, *pool, block_table, positions, scale=self.head_dim**-0.5)
            y = layer.out.add_to(residual.flatten(0, 1), attended.flatten(2).flatten(0, 1))
            y = layer.mlp.add_to(y, layer.mlp_norm(y))
            hidden = y.view(*attended.shape[:2], -1)
        return hidden if self.norms_logits or self.norm is None else self.norm(hidden)

    def _fc(self, x: Tensor) -> Tensor:
        """fc, [B, M, H]."""
        return self.fc(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def _inputs(self, tokens: Tensor, hidden: Tensor, place: Pass) -> tuple[Tensor, Tensor]:
        """What the first layer reads [B, M, 2H or H], and its residual [B, M, H]."""
        if place.masks is not None:
            hidden = place.masks.fill(hidden)
        embedding = F.embedding(tokens, self.embeddings)
        if self.hidden_norm is None:  # EAGLE
            residual = self._fc(torch.cat([embedding, hidden], -1))
            return residual, residual
        normed = self.hidden_norm(hidden)
        residual = normed if self.head.config.norm_before_residual else hidden
        return torch.cat([self.layers[0].input_norm(embedding), normed], -1), residual
