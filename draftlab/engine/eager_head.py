"""A head's decode pass over paged KV caches, in the head's own modules: any device, any dtype.

`FusedHead` (CUDA) and `PrepackedHead` (CPU) implement the same interface. `EagerHead` is
their reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from draftlab.engine.base_drafter import Pools
from draftlab.heads.head import DraftHead
from draftlab.heads.layers import Angles
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.rope_write import rope_angles
from draftlab.kernels.step_layout.types import MaskedColumns


@dataclass(frozen=True)
class PassLayout:
    """Inputs of one pass, M columns a row, and the A columns whose outputs the pass returns.

    Attributes:
        slots: int64 [B, M], cache slots that the keys and values are written to; −1: none.
        angles: `HeadRunner.angles` of the positions, each [B, M, …].
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


class HeadRunner(ABC):
    """Implementation of a head's decode pass."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head

    def project_features(self, features: Tensor) -> Tensor:
        """Return `DraftHead.project_features` of features [..., F]."""
        return self.head.project_features(features)

    @abstractmethod
    def angles(self, positions: Tensor) -> Angles:
        """Return cosines and sines, each [T, …], of positions [T]; −1 is padding.

        A head's family may add tensors of its own.
        """

    @abstractmethod
    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return `DraftHead.logits` [N, W] of outputs [N, H], written to `out` if it is given."""

    @abstractmethod
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


class ProductRunner(HeadRunner):
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


class EagerHead(HeadRunner):
    """The decode pass of a head in its own modules."""

    def angles(self, positions: Tensor) -> Angles:
        return self.head.rope.angles(positions.clamp(min=0))

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        logits = self.head.logits(output)
        return logits if out is None else out.copy_(logits)

    def forward(
        self, tokens: Tensor, hidden: Tensor, layout: PassLayout, block_table: Tensor, pools: Pools
    ) -> Tensor:
        if layout.masks is not None:
            hidden = layout.masks.fill(hidden)
        layers, num_outputs = self.head.layers, layout.output_positions.shape[1]
        queries = layout.layer_queries(len(layers))
        for layer, pool, (counts, positions) in zip(layers, pools, queries, strict=True):
            if layer is layers[0]:
                x, residual = self.head.layer_inputs(self.head.embed(tokens), hidden)
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
                query, *pool, block_table, positions, chunk=layer.chunk, scale=scale
            )
            hidden = layer.output(attended, residual)
        return self.head.output_norm(hidden)
