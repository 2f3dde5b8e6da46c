"""A head's decode pass in few fused kernels (CUDA); `EagerHead` is the reference.

One pass is: inputs (embedding and hidden state, normed, side by side), then for each layer the qkv
product, rotation and cache write, attention, output product plus residual, gated product, and down
product plus residual. A product also computes the sums of the norm that follows it. After the cache
write the last layer runs the output columns only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.eager_head import PassLayout, Pools, ProductRunner
from draftlab.heads.head import DraftHead
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.head_inputs import head_inputs
from draftlab.kernels.linear import linear
from draftlab.target_model.fused_decoder import FusedLayer
from draftlab.target_model.known_layers import LayerWeights


def is_on_gpu_in_one_dtype(head: DraftHead) -> bool:
    """Return whether all weights of a head have one dtype that the fused kernels take."""
    weight = head.fc.weight
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and {p.dtype for p in head.parameters()} == {weight.dtype}
    )


class FusedHead(ProductRunner):
    """The decode pass of a head in fused kernels.

    Args:
        head: on CUDA, in one dtype.
    """

    @torch.no_grad()
    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        scale = head.config.head_dim**-0.5
        next_norms = [*(layer.input_layernorm.weight for layer in head.layers[1:]), None]
        self.layers = [
            FusedLayer(LayerWeights(layer), self.eps, scale, next_norm=next_norm)
            for layer, next_norm in zip(head.layers, next_norms, strict=True)
        ]

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether the fused kernels compute this head."""
        return head.has_fused_passes and is_on_gpu_in_one_dtype(head)

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        norm, weight = self.head.logits_norm_weight(), self.head.lm_head.weight
        return linear(output, weight, norm_weight=norm, eps=self.eps, out=out)

    def forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor, pools: Pools
    ) -> Tensor:
        shape, num_outputs = tokens.shape, layout.output_positions.shape[1]
        angles = tuple(half.flatten(0, 1) for half in layout.angles)
        slots = layout.slots.flatten()
        x, y = self._inputs(tokens, hidden, layout)
        queries = layout.layer_queries(len(self.layers))
        for layer, pool, (counts, positions) in zip(self.layers, pools, queries, strict=True):
            query = layer.write_cache(x, angles, pool, slots)
            query = query.view(*shape, *query.shape[1:])
            if counts is not None:
                query = last_rows(query, counts, num_outputs)
                if len(y) != len(tokens) * num_outputs:
                    y = last_rows(y.view(*shape, -1), counts, num_outputs).flatten(0, 1)
            y, x = layer.output(query, y, pool, block_table, positions)
        return self.head.output_norm(y.view(len(tokens), num_outputs, -1))

    def fc(self, x: Tensor) -> Tensor:
        return linear(x, self.head.fc.weight)

    def _inputs(self, tokens: Tensor, hidden: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Return the first layer's input [B·M, 2H or H] and residual [B·M or B·A, H]."""
        first = self.head.layer
        if self.head.fc_in_every_pass:
            pairs = torch.cat([F.embedding(tokens, self.embeddings), hidden], -1)
            x = self.fc_of_rows(pairs).flatten(0, 1)
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
