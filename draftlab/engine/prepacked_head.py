"""A head's decode pass on a CPU with prepacked weights; `EagerHead` is the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.base_drafter import Pools
from draftlab.engine.eager_head import PassLayout, ProductRunner
from draftlab.heads.head import DraftHead
from draftlab.heads.layers import RMSNorm
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.cpu_prepacked_linear import PrepackedLinear, RowNorm, why_no_prepacking
from draftlab.kernels.paged_attention.plan import plan_reads, plan_writes
from draftlab.target_model.known_layers import LayerWeights
from draftlab.target_model.prepacked_decoder import PrepackedLayer, rotation_factors


class PrepackedHead(ProductRunner):
    """The decode pass of a head on weights that are prepacked for oneDNN.

    Args:
        head: on a CPU, in float32 or bfloat16. Later changes of its weights have no effect.
    """

    @torch.no_grad()
    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.fc, self.lm_head = (PrepackedLinear(m.weight) for m in (head.fc, head.lm_head))
        self.hidden_norm, self.norm = (
            RowNorm(norm.weight, self.eps) if isinstance(norm, RMSNorm) else None
            for norm in (getattr(head.layer, "hidden_norm", None), head.norm)
        )
        self.norms_logits = head.logits_norm_weight() is not None
        scale = head.config.head_dim**-0.5
        self.layers = [
            PrepackedLayer(LayerWeights(layer), self.eps, scale) for layer in head.layers
        ]

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether this head's weights can be prepacked."""
        weight = head.fc.weight
        return head.has_fused_passes and why_no_prepacking(weight.device, weight.dtype) is None

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.norm(output) if self.norms_logits else output)
        return logits if out is None else out.copy_(logits)

    def forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor, pools: Pools
    ) -> Tensor:
        shape, num_outputs = tokens.shape, layout.output_positions.shape[1]
        factors = rotation_factors(tuple(half.flatten(0, 1) for half in layout.angles))
        writes, queries = plan_writes(layout.slots), layout.layer_queries(len(self.layers))
        for layer, pool, (counts, positions) in zip(self.layers, pools, queries, strict=True):
            if layer is self.layers[0]:
                x, hidden = self._inputs(tokens, hidden, layout)
            else:
                x = layer.input_norm(hidden)
            query = layer.write_cache(x.flatten(0, 1), factors, pool, writes)
            query, residual = query.view(*shape, *query.shape[1:]), hidden
            if counts is not None:
                query, residual = (last_rows(t, counts, num_outputs) for t in (query, residual))
            block_size, num_kv_heads = pool[0].shape[1:3]
            group = query.shape[2] // num_kv_heads
            reads = plan_reads(block_table, positions, block_size, group, query.dtype)
            y = layer.output(query, residual.flatten(0, 1), pool, reads)
            hidden = y.view(*query.shape[:2], -1)
        return hidden if self.norms_logits or self.norm is None else self.norm(hidden)

    def _inputs(self, tokens: Tensor, hidden: Tensor, layout: PassLayout) -> tuple[Tensor, Tensor]:
        """Return the first layer's input [B, M, 2H or H] and residual [B, M, H]."""
        if layout.masks is not None:
            hidden = layout.masks.fill(hidden)
        embedding = F.embedding(tokens, self.embeddings)
        if self.hidden_norm is None:  # EAGLE
            residual = self.fc_of_rows(torch.cat([embedding, hidden], -1))
            return residual, residual
        normed = self.hidden_norm(hidden)
        residual = normed if self.head.config.norm_before_residual else hidden
        return torch.cat([self.layers[0].input_norm(embedding), normed], -1), residual
