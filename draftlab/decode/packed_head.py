"""A head's decode pass on a CPU with packed products; the eager head is the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.decode.fused_head import Pass
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.packed_linear import PackedGated, PackedLinear, RowNorm, why_not_packed
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.target.packed import rotate, rotation


class PackedHead:
    """The passes of an EAGLE3 head, with the interface of `FusedHead`.

    Args:
        head: on a CPU, float32 or bfloat16; changes of its weights are not seen.
    """

    @torch.no_grad()
    def __init__(self, head: Eagle3Head) -> None:
        self.head = head
        attention, mlp = head.layer.self_attn, head.layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        self.head_dim, self.num_kv_heads = attention.head_dim, attention.num_kv_heads
        self.fc, self.lm_head = PackedLinear(head.fc.weight), PackedLinear(head.lm_head.weight)
        self.qkv = PackedLinear(torch.cat([p.weight for p in projections]))
        eps = head.config.rms_norm_eps
        layer = head.layer
        self.embedding_norm = RowNorm(layer.input_layernorm.weight, eps)
        self.hidden_norm = RowNorm(layer.hidden_norm.weight, eps)
        self.mlp_norm = RowNorm(layer.post_attention_layernorm.weight, eps)
        self.norm = RowNorm(head.norm.weight, eps)
        self.out = PackedLinear(attention.o_proj.weight)
        self.mlp = PackedGated(mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)

    @staticmethod
    def suits(head: Eagle3Head) -> bool:
        """Whether a head's passes can run so."""
        weight = head.fc.weight
        return why_not_packed(weight.device, weight.dtype) is None

    def fuse(self, features: Tensor) -> Tensor:
        """`Eagle3Head.fuse`."""
        return self.fc(features.flatten(0, -2)).view(*features.shape[:-1], -1)

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`Eagle3Head.logits`, [B, W] of outputs [B, H]; `out`: where they go."""
        found = self.lm_head(self.norm(output))
        return found if out is None else out.copy_(found)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        place: Pass,
        block_table: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
    ) -> Tensor:
        """Pre-norm outputs [B, H] of each row's last pair; the keys of all enter the pools.

        Args:
            tokens: int64 [B, M].
            hidden: [B, M, H].
            place: where the pairs are.
            block_table: int32 [B, N].
            key_pool, value_pool: [P, S, kv heads, head_dim], written in place.
        """
        embedding = F.embedding(tokens, self.head.embed_tokens.weight)
        normed = self.hidden_norm(hidden)
        residual = normed if self.head.layer.norm_before_residual else hidden
        x = torch.cat([self.embedding_norm(embedding), normed], -1)
        cos, sin = (half.flatten(0, 1) for half in place.angles)
        heads = self.qkv(x.flatten(0, 1)).view(tokens.numel(), -1, self.head_dim)
        turned = rotate(heads[:, : -self.num_kv_heads], rotation((cos, sin)))
        query, key = turned[:, : -self.num_kv_heads], turned[:, -self.num_kv_heads :]
        value = heads[:, -self.num_kv_heads :]
        write_paged(key[None], value[None], key_pool, value_pool, place.slots)
        query = query.view(*tokens.shape, *query.shape[1:])
        if place.counts is not None:
            query, residual = (last_rows(t, place.counts) for t in (query, residual))
        attended = attend_paged(
            query,
            key_pool,
            value_pool,
            block_table,
            place.last[:, None],
            scale=self.head_dim**-0.5,
        )
        y = self.out.added_to(residual[:, 0], attended.flatten(1))
        return self.mlp.added_to(y, self.mlp_norm(y))
