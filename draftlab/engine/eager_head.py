"""A head's decode pass over paged caches, in the head's own modules: any device, any dtype.

`FusedHead` (CUDA, 16-bit) and `PackedHead` (CPU) have its interface, and it is their reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.heads.layers import Angles
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.step_types import MaskedColumns

Pools = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [P, S, kv heads, head_dim], written in place."""


@dataclass(frozen=True)
class Pass:
    """Where the slots of one pass are, M a row, and which outputs are asked for.

    Attributes:
        slots: int64 [B, M], where their keys go; −1 nowhere.
        angles: cosines and sines [B, M, …], as the head's path rotates by, and what else it needs
            of positions.
        positions: int64 [B, M], consecutive; −1 is padding, at the end.
        asked: int64 [B, A], positions of those whose outputs are asked for.
        counts: int64 [B]; they are A columns from counts − 1 on. None: all, A = M.
        masks: slots without a hidden state of their own; None: there are none.
    """

    slots: Tensor
    angles: Angles
    positions: Tensor
    asked: Tensor
    counts: Tensor | None = None
    masks: MaskedColumns | None = None

    def parts(self, num_layers: int) -> Iterator[tuple[Tensor | None, Tensor]]:
        """`counts` and the queries' positions of each layer.

        Only the last one's queries end at what is asked for: the others' make keys.
        """
        for _ in range(num_layers - 1):
            yield None, self.positions
        yield self.counts, self.asked


class HeadPasses(Protocol):
    """How a head's passes run."""

    def project_features(self, features: Tensor) -> Tensor:
        """`DraftHead.project_features`."""

    def angles(self, positions: Tensor) -> Angles:
        """Of positions [T], what `forward` takes of them, each [T, …]; −1 is padding."""

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """`DraftHead.logits`, [N, W] of outputs [N, H]; `out`: where they go."""

    def forward(
        self, tokens: Tensor, hidden: Tensor, place: Pass, block_table: Tensor, pools: Pools
    ) -> Tensor:
        """The head's outputs [B, A, H] of what is asked for; the keys of all enter the pools.

        Args:
            tokens: int64 [B, M].
            hidden: [B, M, H]; with masks those of a row's first columns are enough.
            place: where the slots are.
            block_table: int32 [B, N].
            pools: of each layer.
        """


class PlainHead:
    """The passes of a head, in its own modules."""

    def __init__(self, head: DraftHead) -> None:
        self.head = head

    def project_features(self, features: Tensor) -> Tensor:
        """See `HeadPasses`."""
        return self.head.project_features(features)

    def angles(self, positions: Tensor) -> Angles:
        """See `HeadPasses`."""
        return self.head.rope.angles(positions.clamp(min=0))

    def logits(self, output: Tensor, *, out: Tensor | None = None) -> Tensor:
        """See `HeadPasses`."""
        found = self.head.logits(output)
        return found if out is None else out.copy_(found)

    def forward(
        self, tokens: Tensor, hidden: Tensor, place: Pass, block_table: Tensor, pools: Pools
    ) -> Tensor:
        """See `HeadPasses`."""
        if place.masks is not None:
            hidden = place.masks.fill(hidden)
        layers, asked = self.head.layers, place.asked.shape[1]
        parts = place.parts(len(layers))
        for layer, pool, (counts, positions) in zip(layers, pools, parts, strict=True):
            if layer is layers[0]:
                x, residual = self.head.layer_inputs(self.head.embed(tokens), hidden)
            else:
                x, residual = layer.input_layernorm(hidden), hidden
            angles = place.angles
            write_paged(*layer.self_attn.key_value(x, angles), *pool, place.slots)
            if counts is not None:
                x, residual, *angles = (
                    last_rows(t, counts, asked) for t in (x, residual, *place.angles)
                )
            query = layer.self_attn.query(x, angles)
            scale = query.shape[-1] ** -0.5
            attended = attend_paged(
                query, *pool, block_table, positions, chunk=layer.chunk, scale=scale
            )
            hidden = layer.output(attended, residual)
        return self.head.output_norm(hidden)
