"""A head's decode pass over paged KV caches, three times.

`EagerHead` runs the head's own modules, on any device and in any dtype. It is the reference of
`FusedHead` (few fused kernels, CUDA) and of `PrepackedHead` (weights packed for oneDNN, CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.base_drafter import Pools
from draftlab.heads.head import DraftHead
from draftlab.heads.layers import Angles, RMSNorm
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.cpu_prepacked_linear import PrepackedLinear, RowNorm, why_no_prepacking
from draftlab.kernels.head_inputs import head_inputs
from draftlab.kernels.linear import linear
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.paged_attention.plan import plan_reads, plan_writes
from draftlab.kernels.rope_write import rope_angles
from draftlab.kernels.step_layout.types import MaskedColumns
from draftlab.target_model.fused_decoder import FusedLayer
from draftlab.target_model.known_layers import LayerWeights
from draftlab.target_model.prepacked_decoder import PrepackedLayer, rotation_factors


@dataclass(frozen=True)
class PassLayout:
    """Inputs of one pass, M columns a row, and the A columns whose outputs the pass returns.

    Attributes:
        slots: int64 [B, M], cache slots that the keys and values are written to; −1: none.
        angles: `EagerHead.angles` of the positions, each [B, M, …].
        positions: int64 [B, M], consecutive; −1 is padding, at the end.
        output_positions: int64 [B, A], positions of the columns whose outputs are returned.
        counts: int64 [B]; these are the A columns from counts − 1 on. None: all columns, A = M.
        masks: columns without a hidden state of their own; None: there are none.
    """

    slots: Tensor
    angles: Angles
    positions: Tensor
    output_positions: Tensor
    counts: Tensor | None = None
    masks: MaskedColumns | None = None

    def layer_queries(self, num_layers: int) -> Iterator[tuple[Tensor | None, Tensor]]:
        """Yield each layer's `counts` and query positions.

        The last layer runs queries for the returned columns only. Earlier layers run all of them,
        since their outputs give the next layer's keys.
        """
        for _ in range(num_layers - 1):
            yield None, self.positions
        yield self.counts, self.output_positions


class EagerHead:
    """The decode pass of a head in its own modules, and the interface of the faster ones."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head

    def project_features(self, features: Tensor) -> Tensor:
        """Return `DraftHead.project_features` of features [..., F]."""
        return self.head.project_features(features)

    def angles(self, positions: Tensor) -> Angles:
        """Return cosines and sines, each [T, …], of positions [T]; −1 is padding.

        A head's family may add tensors of its own.
        """
        return self.head.rope.angles(positions.clamp(min=0))

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return `DraftHead.logits` [N, W] of outputs [N, H], written to `out` if it is given."""
        logits = self.head.logits(output)
        return logits if out is None else out.copy_(logits)

    def forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor, pools: Pools
    ) -> Tensor:
        """Return the outputs [B, A, H] of the layout's output columns.

        The keys and values of all M columns are written to the pools.

        Args:
            tokens: int64 [B, M].
            hidden: [B, M, H]; with masks the hidden states of a row's first columns are enough.
            layout: cache slots, positions and output columns.
            block_table: int32 [B, N].
            pools: of each layer.
        """
        if layout.masks is not None:
            hidden = layout.masks.fill(hidden)
        layers, num_outputs = self.head.layers, layout.output_positions.shape[1]
        queries = layout.layer_queries(len(layers))
        for layer, pool, (counts, positions) in zip(layers, pools, queries, strict=True):
            if layer is layers[0]:
                embedding = self.head.embed_at(tokens, layout.positions)
                x, residual = self.head.layer_inputs(embedding, hidden)
            else:
                x, residual = layer.input_layernorm(hidden), hidden
            angles = layout.angles
            write_paged(*layer.self_attn.key_value(x, angles), *pool, layout.slots)
            if counts is not None:
                x, residual, *angles = (
                    last_rows(t, counts, num_outputs) for t in (x, residual, *layout.angles)
                )
            query = layer.self_attn.query(x, angles)
            scale = query.shape[-1] ** -0.5
            attended = attend_paged(
                query,
                *pool,
                block_table,
                positions,
                scale=scale,
                window=layer.window,
                chunk=layer.chunk,
            )
            hidden = layer.output(attended, residual)
        return self.head.output_norm(hidden)


class ProductRunner(EagerHead):
    """Base class of decode passes that replace a head's products and its rotary embedding.

    Attributes:
        fc: returns the head's fc [N, H] of rows [N, …].
    """

    fc: Callable[[Tensor], Tensor]

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.embeddings, self.eps = head.embedding_table(), head.config.rms_norm_eps

    def project_features(self, features: Tensor) -> Tensor:
        if self.head.fc_in_every_pass:
            return super().project_features(features)
        return self.fc_of_rows(self.head.normed_features(features))

    def fc_of_rows(self, x: Tensor) -> Tensor:
        """Return fc [B, M, H] of x [B, M, …]."""
        return self.fc(x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def angles(self, positions: Tensor) -> Angles:
        rope = self.head.rope
        return rope_angles(positions, rope.frequencies, rope.scaling, self.head.fc.weight.dtype)


def is_on_gpu_in_one_dtype(head: DraftHead) -> bool:
    """Return whether all weights of a head have one dtype that the fused kernels take."""
    weight = head.fc.weight
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and {p.dtype for p in head.parameters()} == {weight.dtype}
    )


def fused_layers(head: DraftHead) -> list[FusedLayer]:
    """Return the layers of a head on CUDA; each begins the norm of the next one."""
    eps, scale = head.config.rms_norm_eps, head.config.head_dim**-0.5
    next_norms = [*(layer.input_layernorm.weight for layer in head.layers[1:]), None]
    return [
        FusedLayer(LayerWeights(layer), eps, scale, window=layer.window, next_norm=next_norm)
        for layer, next_norm in zip(head.layers, next_norms, strict=True)
    ]


class FusedHead(ProductRunner):
    """The decode pass of a head in fused kernels.

    One pass is: inputs (embedding and hidden state, normed, side by side), then for each layer the
    qkv product, rotation and cache write, attention, output product plus residual, gated product,
    and down product plus residual. A product also computes the sums of the norm that follows it.
    After the cache write the last layer runs the output columns only.

    Args:
        head: on CUDA, in one dtype.
    """

    @torch.no_grad()
    def __init__(self, head: DraftHead) -> None:
        super().__init__(head)
        self.layers = fused_layers(head)

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
            PrepackedLayer(LayerWeights(layer), self.eps, scale, layer.window)
            for layer in head.layers
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
            reads = plan_reads(
                block_table, positions, block_size, group, query.dtype, window=layer.window
            )
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
