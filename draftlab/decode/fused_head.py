"""A head's decode pass on few kernels (CUDA, 16-bit); the eager head is the reference.

One pass is: inputs (embedding and hidden state, normed, side by side), qkv, rotation and cache
write, attention, output product plus residual, gated product with the norm in front, down product
plus residual.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.linear import gated_linear, linear
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_angles, rope_write


class FusedHead:
    """The passes of an EAGLE3 head; weights are the head's own, but qkv, which is a stacked copy.

    Args:
        head: on CUDA, bfloat16 or float16.
    """

    def __init__(self, head: Eagle3Head) -> None:
        self.head, self.layer, self.eps = head, head.layer, head.config.rms_norm_eps
        attention = head.layer.self_attn
        with torch.no_grad():
            self.qkv = torch.cat(
                [p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            )

    @staticmethod
    def suits(head: Eagle3Head) -> bool:
        """Whether a head's passes can run so."""
        weight = head.fc.weight
        return weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)

    def fuse(self, features: Tensor) -> Tensor:
        """`Eagle3Head.fuse`."""
        return linear(features.flatten(0, -2), self.head.fc.weight).view(*features.shape[:-1], -1)

    def logits(self, output: Tensor) -> Tensor:
        """`Eagle3Head.logits`, [B, W] of outputs [B, H]."""
        head = self.head
        return linear(output, head.lm_head.weight, norm_weight=head.norm.weight, eps=self.eps)

    def forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        block_table: Tensor,
        key_pool: Tensor,
        value_pool: Tensor,
    ) -> Tensor:
        """Pre-norm outputs [B, M, H] of pairs at `positions` [B, M]; their keys go to `slots`."""
        layer, eps = self.layer, self.eps
        x, residual = layer.inputs(self.head.embed_tokens(tokens), hidden)
        flat = x.flatten(0, 1)
        angles = rope_angles(positions.flatten(), self.head.rope.frequencies, 1.0, x.dtype)
        query = rope_write(
            linear(flat, self.qkv),
            angles,
            key_pool,
            value_pool,
            slots.flatten(),
        )
        attended = attend_paged(
            query.view(*tokens.shape, *query.shape[1:]),
            key_pool,
            value_pool,
            block_table,
            positions,
            scale=query.shape[-1] ** -0.5,
        ).view(len(flat), -1)
        y = linear(attended, layer.self_attn.o_proj.weight, residual=residual.flatten(0, 1))
        norm = layer.post_attention_layernorm.weight
        mlp = layer.mlp
        inner = gated_linear(y, mlp.gate_proj.weight, mlp.up_proj.weight, norm_weight=norm, eps=eps)
        return linear(inner, mlp.down_proj.weight, residual=y).view(*tokens.shape, -1)
