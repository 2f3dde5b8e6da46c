"""A head's decode pass in few fused kernels (CUDA, 16-bit); `EagerHead` is the reference.

One pass is: inputs (embedding and hidden state, normed, side by side), then for each layer the qkv
product, rotation and cache write, attention, output product plus residual, gated product, and down
product plus residual. A product also computes the sums of the norm that follows it. After the cache
write the last layer runs the output columns only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.eager_head import HeadRunner, PassLayout, Pools
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.head_inputs import head_inputs
from draftlab.kernels.linear import linear, linear_then_norm, swiglu_linear
from draftlab.kernels.paged_attention import attend_paged
from draftlab.kernels.rope_write import rope_angles, rope_write


@dataclass(frozen=True)
class _Layer:
    """Parameters of a layer; all but qkv, a stacked copy, share the head's storage."""

    qkv: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def _read_layer(layer: DecoderLayer) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return _Layer(
        qkv=torch.cat([p.weight for p in projections]),
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        out=attention.o_proj.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate=mlp.gate_proj.weight,
        up=mlp.up_proj.weight,
        down=mlp.down_proj.weight,
    )


class FusedHead(HeadRunner):
    """The decode pass of a head in fused kernels.

    Args:
        head: on CUDA, in bfloat16 or float16.
    """

    @torch.no_grad()
    def __init__(self, head: DraftHead) -> None:
        self.head, self.eps = head, head.config.rms_norm_eps
        self.layers = [_read_layer(layer) for layer in head.layers]
        # The norm before each later layer's qkv.
        self.norms = [layer.input_layernorm.weight for layer in head.layers[1:]]
        self.embeddings = head.embedding_table()

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether the fused kernels compute this head."""
        weight = head.fc.weight
        return (
            head.has_fused_passes
            and weight.is_cuda
            and weight.dtype in (torch.bfloat16, torch.float16)
            and {p.dtype for p in head.parameters()} == {weight.dtype}
        )

    def project_features(self, features: Tensor) -> Tensor:
        if self.head.fc_in_every_pass:
            return self.head.project_features(features)
        return self._fc(self.head.normed_features(features))

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rope_angles(positions, self.head.rope.frequencies, 1.0, self.head.fc.weight.dtype)

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        norm, weight = self.head.logits_norm_weight(), self.head.lm_head.weight
        return linear(output, weight, norm_weight=norm, eps=self.eps, out=out)

    def forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor, pools: Pools
    ) -> Tensor:
        eps, shape, num_outputs = self.eps, tokens.shape, layout.output_positions.shape[1]
        angles = tuple(half.flatten(0, 1) for half in layout.angles)
        slots = layout.slots.flatten()
        x, y = self._inputs(tokens, hidden, layout)
        queries = layout.layer_queries(len(self.layers))
        for number, (layer, pool, (counts, positions)) in enumerate(
            zip(self.layers, pools, queries, strict=True)
        ):
            qkv = linear(x, layer.qkv)
            query = rope_write(
                qkv, angles, *pool, slots, q_norm=layer.q_norm, k_norm=layer.k_norm, eps=eps
            )
            query = query.view(*shape, *query.shape[1:])
            if counts is not None:
                query = last_rows(query, counts, num_outputs)
                if len(y) != len(tokens) * num_outputs:
                    y = last_rows(y.view(*shape, -1), counts, num_outputs).flatten(0, 1)
            attended = attend_paged(
                query,
                *pool,
                block_table,
                positions,
                scale=query.shape[-1] ** -0.5,
                prefetch_weight=layer.out,
            )
            attended = attended.flatten(2).flatten(0, 1)
            y, normed = linear_then_norm(attended, layer.out, layer.mlp_norm, eps, residual=y)
            inner = swiglu_linear(normed, layer.gate, layer.up)
            if number == len(self.layers) - 1:
                y = linear(inner, layer.down, residual=y)
            else:
                y, x = linear_then_norm(inner, layer.down, self.norms[number], eps, residual=y)
        return self.head.output_norm(y.view(len(tokens), num_outputs, -1))

    def _fc(self, x: Tensor) -> Tensor:
        """Return fc [B, M, H] of x [B, M, …]."""
        return linear(x.flatten(0, -2), self.head.fc.weight).view(*x.shape[:-1], -1)

    def _inputs(self, tokens: Tensor, hidden: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Return the first layer's input [B·M, 2H or H] and residual [B·M or B·A, H]."""
        first = self.head.layer
        if self.head.fc_in_every_pass:
            pairs = torch.cat([F.embedding(tokens, self.embeddings), hidden], -1)
            x = self._fc(pairs).flatten(0, 1)
            return x, x
        x, residual = head_inputs(
            tokens,
            hidden,
            self.embeddings,
            first.input_layernorm.weight,
            first.hidden_norm.weight,
            self.eps,
            norm_before_residual=first.norm_before_residual,
            counts=layout.counts if len(self.layers) == 1 else None,
            num_columns=layout.output_positions.shape[1],
            masks=layout.masks,
        )
        return x.flatten(0, 1), residual.flatten(0, 1)
