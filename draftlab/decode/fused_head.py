"""A head's decode pass on few kernels (CUDA, 16-bit); the eager head is the reference.

One pass is: inputs (embedding and hidden state, normed, side by side), qkv, rotation and cache
write, attention, output product plus residual, gated product with the norm in front, down product
plus residual. Of many pairs a row, only the last one's output is asked for: behind the cache write
the others end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.head_inputs import head_inputs
from draftlab.kernels.linear import gated_linear, linear, linear_then_norm
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_write


@dataclass(frozen=True)
class Pass:
    """Where the pairs of one pass are.

    Attributes:
        slots: int64 [B, M], where their keys go.
        angles: cosines and sines [B, M, …], as the head's path rotates by.
        last: int64 [B], position of each row's last pair; −1 for a row of padding.
        counts: int64 [B], pairs of each row (at least 1); None where M = 1.
    """

    slots: Tensor
    angles: tuple[Tensor, Tensor]
    last: Tensor
    counts: Tensor | None = None


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
        return (
            weight.is_cuda
            and weight.dtype in (torch.bfloat16, torch.float16)
            and {p.dtype for p in head.parameters()} == {weight.dtype}
        )

    def fuse(self, features: Tensor) -> Tensor:
        """`Eagle3Head.fuse`."""
        return linear(features.flatten(0, -2), self.head.fc.weight).view(*features.shape[:-1], -1)

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`Eagle3Head.logits`, [B, W] of outputs [B, H]; `out`: where they go."""
        head = self.head
        norm = head.norm.weight
        return linear(output, head.lm_head.weight, norm_weight=norm, eps=self.eps, out=out)

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
        layer, mlp, eps = self.layer, self.layer.mlp, self.eps
        x, residual = head_inputs(
            tokens,
            hidden,
            self.head.embed_tokens.weight,
            layer.input_layernorm.weight,
            layer.hidden_norm.weight,
            eps,
            norm_before_residual=layer.norm_before_residual,
            counts=place.counts,
        )
        angles = tuple(half.flatten(0, 1) for half in place.angles)
        qkv = linear(x.flatten(0, 1), self.qkv)
        query = rope_write(qkv, angles, key_pool, value_pool, place.slots.flatten())
        query = query.view(*tokens.shape, *query.shape[1:])
        attended = attend_paged(
            query if place.counts is None else last_rows(query, place.counts),
            key_pool,
            value_pool,
            block_table,
            place.last[:, None],
            scale=query.shape[-1] ** -0.5,
            ahead=layer.self_attn.o_proj.weight,
        ).flatten(1)
        norm = layer.post_attention_layernorm.weight
        y, normed = linear_then_norm(
            attended, layer.self_attn.o_proj.weight, norm, eps, residual=residual[:, 0]
        )
        inner = gated_linear(normed, mlp.gate_proj.weight, mlp.up_proj.weight)
        return linear(inner, mlp.down_proj.weight, residual=y)
