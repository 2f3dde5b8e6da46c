"""`block_outputs` with less work and the same outputs and gradients (methods §7).

Rows are the slots of valid anchors, by slot: the keys of a slot lie side by side, as attention
reads them. Padding exists in attention only. Up to the first layer's attention or convolution all
mask tokens are equal and share one row. Weights and the operations between products are those of
`train/fast/layers.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.block import BlockHead
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.fused_ops import FusedOps, expand_last
from draftlab.train.fast.layers import (
    FastForward,
    LayerInputs,
    LayerWeights,
    layer_inputs,
    pad_rows,
    unpad_rows,
)
from draftlab.train.fast.shared_gradients import select_rows
from draftlab.train.objectives.block import block_attention, slot_row_indices, step_anchors
from draftlab.train.objectives.loss import row_starts


class FastBlock(FastForward):
    """Fast forward pass of `block_outputs`."""

    description = "all blocks run side by side"

    @staticmethod
    def supports(head: DraftHead) -> bool:
        return isinstance(head, BlockHead)

    @classmethod
    def supports_fp8(cls, head: DraftHead) -> bool:
        return cls.supports(head) and all(type(layer) is DecoderLayer for layer in head.layers)

    def outputs(self, head: BlockHead, batch: Batch, steps: list[StepRows]) -> tuple[Tensor, ...]:
        slots = _BlockPass(head, batch, steps[0], self.dtype, self.ops).run()
        num_anchors = len(steps[0].valid_rows)
        indices = [
            slot * num_anchors + anchors
            for slot, anchors in enumerate(step_anchors(steps), head.config.first_slot)
        ]
        return select_rows(slots, torch.cat(indices)).split([len(index) for index in indices])


class _BlockPass:
    """The pass over one batch: T = B · S context rows, and the slots of n anchors (the rows of the
    first step), by slot.
    """

    def __init__(
        self, head: BlockHead, batch: Batch, anchors: StepRows, dtype: torch.dtype, ops: FusedOps
    ) -> None:
        self.head, self.batch, self.anchors, self.dtype = head, batch, anchors, dtype
        self.ops, self.eps = ops, head.config.rms_norm_eps
        self.num_slots = head.config.block_size
        positions = batch.positions.flatten()
        slots = torch.arange(self.num_slots, device=positions.device)[:, None]
        slot_positions = (positions[anchors.origin] + 1 + slots).flatten()
        self.angles = head.rope.angles(torch.cat([positions, slot_positions]))
        self.starts = row_starts(document_starts(batch.documents), anchors)
        self.key_rows = slot_row_indices(anchors.index, self.num_slots)
        self.padded = replace(  # rows of all slots [slots, B, A], those of `anchors` for each
            anchors,
            index=anchors.index.expand(self.num_slots, -1, -1),
            valid_rows=(anchors.valid_rows + anchors.index.numel() * slots).flatten(),
        )

    def run(self) -> Tensor:
        """Return the outputs [slots · n, H]."""
        head, dtype = self.head, self.dtype
        features = self.batch.features.flatten(0, 1).to(dtype)
        context = head.hidden_norm(F.linear(features, head.fc.weight.to(dtype)))
        newest = self.batch.tokens.flatten()[self.anchors.teacher_index]
        tokens = torch.cat([newest, newest.new_full((1,), head.mask_token_id)])
        hidden = head.embed(tokens).to(dtype)
        for layer, window in zip(head.layers, head.config.windows, strict=True):
            hidden = self.layer(layer, hidden, context, window)
        return hidden

    def layer(
        self, layer: DecoderLayer, hidden: Tensor, context: Tensor, window: int | None
    ) -> Tensor:
        """Return the layer's outputs [slots · n, H], from context [T, H] and hidden states
        [slots · n, H], or [n + 1, H] while mask tokens share the last row.
        """
        weights = LayerWeights(layer, self.dtype, self.ops)
        if type(layer) is DecoderLayer:
            projections = weights.projections(self.eps, layer.input_layernorm.weight)
            inputs = layer_inputs(projections, hidden, self.angles, context=context)
            attended = self.attend(inputs, window)
            residual = expand_last(inputs.previous, len(attended))
            return weights.run_output(attended.flatten(1), residual, self.eps)

        def by_slot(x: Tensor) -> Tensor:
            return x.unflatten(0, (self.num_slots, -1))

        x, finish = layer.begin_by(
            by_slot(expand_last(hidden, len(self.padded.valid_rows))),
            0,
            self.ops.convolve_slots,
            lambda x: by_slot(weights.output.product(x.flatten(0, 1))),
            lambda x: by_slot(weights.feed_forward(x.flatten(0, 1))),
        )
        projections = weights.projections(self.eps, None)
        inputs = layer_inputs(projections, x.flatten(0, 1), self.angles, context=context)
        return finish(by_slot(self.attend(inputs, window))).flatten(0, 1)

    def attend(self, inputs: LayerInputs, window: int | None) -> Tensor:
        """Return attended values [slots · n, heads, head_dim]."""
        query, key, value = (
            pad_rows(x, self.padded) for x in (inputs.query, inputs.key, inputs.value)
        )
        context = inputs.context_key, inputs.context_value
        attended = block_attention(
            query.permute(1, 2, 0, 3, 4),
            tuple(x.unflatten(0, self.batch.tokens.shape) for x in context),
            StepKeyValues(key.unbind(), value.unbind(), self.key_rows),
            self.anchors.index,
            self.starts,
            window=window,
            is_causal=self.head.config.is_causal,
        )
        return unpad_rows(attended.permute(2, 0, 1, 3, 4), self.padded)
