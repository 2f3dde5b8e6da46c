"""`parallel_outputs` with less work and the same outputs and gradients (methods §4).

Depth 0 at every position and all masked slots are rows of one tensor, so that a layer runs each
product once. Up to the first layer's attention all masked slots are equal and share one row.
Padding rows exist in attention only. Weights and the operations between products are those of
`train/fast/layers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.devices import copy_to_device
from draftlab.kernels.parallel_attention import ParallelRows, parallel_attention
from draftlab.kernels.ttt_attention import document_starts
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.fused_ops import FusedOps, expand_last
from draftlab.train.fast.layers import FastForward, LayerWeights, layer_inputs
from draftlab.train.fast.shared_gradients import Shared
from draftlab.train.objectives.loss import row_starts, step_of_row


class FastParallel(FastForward):
    """Fast forward pass of `parallel_outputs`."""

    description = "all depths run side by side"

    @staticmethod
    def supports(head: DraftHead) -> bool:
        return type(head) is PeagleHead

    def outputs(self, head: PeagleHead, batch: Batch, steps: list[StepRows]) -> tuple[Tensor, ...]:
        output = _ParallelPass(head, batch, steps, self.dtype, self.ops).run()
        return output.split([len(rows.valid_rows) for rows in steps])


class _ParallelPass:
    """The pass over one batch: T = B · S rows of depth 0, then M masked slots, sorted by depth."""

    def __init__(
        self,
        head: PeagleHead,
        batch: Batch,
        steps: list[StepRows],
        dtype: torch.dtype,
        ops: FusedOps,
    ) -> None:
        self.head, self.batch, self.steps, self.dtype = head, batch, steps, dtype
        self.ops, self.eps = ops, head.config.rms_norm_eps
        positions = batch.positions.flatten()
        self.num_positions = len(positions)
        teachers = torch.cat([positions[:0], *(rows.teacher_index for rows in steps[1:])])
        self.num_masked = len(teachers)
        self.angles = head.rope.angles(torch.cat([positions, positions[teachers] - 1]))
        self.all_rows, self.loss_rows = attention_rows(batch, steps)

    def run(self) -> Tensor:
        """Return the outputs [N_0 + M, H] at the rows that carry loss, sorted by depth."""
        layers = self.head.layers
        inputs, residual = self.inputs()
        hidden = self.layer(layers[0], None, inputs, residual, last=len(layers) == 1)
        for number, layer in enumerate(layers[1:], 2):
            norm = layer.input_layernorm.weight
            hidden = self.layer(layer, norm, hidden, None, last=number == len(layers))
        return hidden

    def inputs(self) -> tuple[Tensor, Tensor]:
        """Return the first layer's inputs of attention [T + 1, 2H] and residual [T + 1, H].

        All masked slots share the last row.
        """
        head, dtype = self.head, self.dtype
        fc, features = Shared(head.fc.weight, dtype=dtype), self.batch.features.flatten(0, 1)
        hidden = torch.cat(
            [fc.product(head.normed_features(x.to(dtype))) for x in (features, head.mask_hidden)]
        )
        next_tokens = self.batch.tokens.roll(-1, dims=1).flatten()
        embeddings = head.embed(next_tokens), head.mask_embedding[None]
        return head.layer.inputs(torch.cat([x.to(dtype) for x in embeddings]), hidden)

    def layer(
        self,
        layer: DecoderLayer,
        norm: Tensor | None,
        hidden: Tensor,
        residual: Tensor | None,
        *,
        last: bool,
    ) -> Tensor:
        """Return the layer's outputs [T + M, H], those of the last layer at loss rows alone.

        Args:
            norm: weight of the norm that attention reads; None: it reads `hidden` itself.
            hidden: T + M rows, or T + 1 while masked slots share one.
            residual: as many rows; None: they are `hidden`.
        """
        weights = LayerWeights(layer, self.dtype, self.ops)
        projections = weights.projections(self.eps, norm)
        if last:  # keys of depth 0 are read at every position, its outputs only at these rows
            rows = self.steps[0]
            masked = torch.arange(self.num_positions, len(hidden), device=hidden.device)
            index = torch.cat([rows.origin, masked])
            angles = tuple(
                torch.cat([x[rows.origin], x[self.num_positions :]]) for x in self.angles
            )
            keys = layer_inputs(projections._replace(query=None), hidden, self.angles)
            queries = projections._replace(key_value=None)
            inputs = layer_inputs(queries, keys.previous, angles, origin=index)
            attended = self.attend(inputs.query, keys.key, keys.value, self.loss_rows)
            residual = inputs.residual if residual is None else residual.index_select(0, index)
        else:
            inputs = layer_inputs(projections, hidden, self.angles)
            attended = self.attend(inputs.query, inputs.key, inputs.value, self.all_rows)
            residual = inputs.previous if residual is None else residual
        return weights.run_output(attended, expand_last(residual, len(attended)), self.eps)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: PaddedRows) -> Tensor:
        """Return attended values [n, Q] of queries [n, heads, head_dim] of `rows`, and keys and
        values of all rows, [T + M, kv heads, head_dim].
        """
        (key, slot_key), (value, slot_value) = (
            x.split([self.num_positions, self.num_masked]) for x in (key, value)
        )
        shape = self.batch.tokens.shape
        key, value = key.unflatten(0, shape), value.unflatten(0, shape)
        attended = parallel_attention(
            rows.pad(query), key, value, slot_key, slot_value, rows.layout
        )
        return rows.unpad(attended).flatten(1)


class PaddedRows:
    """The n rows that have queries, sorted by depth, and their padded layout [B, R], in which they
    lie at `places`, b · R + r: int64 [n].
    """

    def __init__(self, layout: ParallelRows, places: Tensor) -> None:
        self.layout, self._places, self._shape = layout, places, layout.index.shape
        # A single batch row has no padding, and its rows lie in the same order.
        self._is_padded = self._shape[0] > 1

    def pad(self, x: Tensor) -> Tensor:
        """Return x [n, …] as [B, R, …] with zeros in padding rows."""
        if self._is_padded:
            x = x.new_zeros(self._shape.numel(), *x.shape[1:]).index_copy(0, self._places, x)
        return x.unflatten(0, self._shape)

    def unpad(self, x: Tensor) -> Tensor:
        """Return the rows [n, …] of x [B, R, …], the inverse of `pad`."""
        x = x.flatten(0, 1)
        return x.index_select(0, self._places) if self._is_padded else x


def attention_rows(batch: Batch, steps: Sequence[StepRows]) -> tuple[PaddedRows, PaddedRows]:
    """Return the rows of all depths: with every position at depth 0, and with loss rows alone."""
    num_positions, device = batch.tokens.numel(), batch.tokens.device
    num_batch, width = batch.tokens.shape
    starts, masked = document_starts(batch.documents), steps[1:]
    depth = step_of_row([len(rows.valid_rows) for rows in steps], device)
    anchor = torch.cat([rows.teacher_index for rows in steps]) - 1 - depth
    depth, anchor = (x[len(steps[0].valid_rows) :] for x in (depth, anchor))
    number = torch.arange(len(depth), device=device)
    slots = number.new_full((len(masked) * num_positions,), -1)  # of each depth at each position
    slots = slots.index_copy(0, (depth - 1) * num_positions + anchor, number)
    slots = slots.view(len(masked), num_positions)
    # The slots that read a slot's key are those of its anchor, from its depth on.
    readers = slots.index_select(1, anchor)
    reads = (readers >= 0) & (torch.arange(1, len(steps), device=device)[:, None] >= depth)
    batch_start = torch.arange(num_batch, device=device)[:, None] * width

    def padded(first: Tensor, first_valid: Tensor) -> PaddedRows:
        """Return the rows of all depths; `StepRows.index` and `valid_rows` of depth 0 are given."""
        index = torch.cat([first, *(rows.index for rows in masked)], 1)
        sizes = first.shape[1], *(rows.index.shape[1] for rows in masked)
        if num_batch == 1:
            places = torch.arange(index.numel(), device=device)
        else:
            places = _places(sizes, [first_valid, *(rows.valid_rows for rows in masked)])
        layout = ParallelRows(
            sizes,
            index,
            row_starts(starts, replace(steps[0], index=index, valid_rows=places)),
            slots[:, batch_start + index],
            torch.where(reads, places[len(first_valid) :][readers], -1),
            copy_to_device(torch.tensor([0, *accumulate(sizes)]), device),
        )
        return PaddedRows(layout, places)

    position = torch.arange(num_positions, device=device)
    everywhere = position[:width].expand(num_batch, width)
    return padded(everywhere, position), padded(steps[0].index, steps[0].valid_rows)


def _places(sizes: Sequence[int], valid_rows: Sequence[Tensor]) -> Tensor:
    """Return where the valid rows of each depth lie in [B, Σ sizes], flat."""
    places, before = [], 0
    for size, rows in zip(sizes, valid_rows, strict=True):
        places.append(rows // size * sum(sizes) + before + rows % size)
        before += size
    return torch.cat(places)
