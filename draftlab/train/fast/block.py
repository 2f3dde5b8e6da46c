"""`block_outputs` with less work and the same outputs and gradients (methods §7).

Rows are the slots of valid anchors; padding exists in attention only. Up to the first layer's
attention all mask tokens are equal and share one row. Weights and the operations between products
are those of `train/fast/layers.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.heads.block import BlockHead
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import Angles, Attention
from draftlab.kernels.ttt_attention import document_starts
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.fused_ops import FUSED_OPS, FusedOps
from draftlab.train.fast.layers import (
    LayerWeights,
    norm_weights,
    pad_rows,
    unpad_rows,
)
from draftlab.train.fast.shared_gradients import Shared, branch
from draftlab.train.objectives.block import block_attention, output_slots
from draftlab.train.objectives.loss import StepOutput, row_starts


class FastBlock:
    """Fast forward pass with the signature of `block_outputs`.

    Args:
        dtype: of products, norms and saved activations.
        ops: `FUSED_OPS`, or the same compiled.
    """

    description = "all blocks run side by side"
    can_recompute = False

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether the head is a block head whose layers have plain attention."""
        return type(head) is BlockHead and all(
            type(layer) is DecoderLayer and type(layer.self_attn) is Attention
            for layer in head.layers
        )

    def __init__(self, dtype: torch.dtype, *, ops: FusedOps = FUSED_OPS) -> None:
        self.dtype, self.ops = dtype, ops

    def __call__(self, head: BlockHead, batch: Batch) -> list[StepOutput]:
        """Return each step's output."""
        steps = [rows for rows in batch.steps if rows.index.shape[1]]
        if not steps:
            return []
        # All tensors have one dtype already. Autocast would widen norms and cast their readers.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            slots = _BlockPass(head, batch, steps[0], self.dtype, self.ops).run()
            rows = output_slots(steps, head.config)
            output = branch(slots, torch.cat(rows))[1]
        outputs = output.split([len(each) for each in rows])
        return [StepOutput(o, rows.teacher_index) for o, rows in zip(outputs, steps, strict=True)]


class _BlockPass:
    """The pass over one batch: T = B · S context rows, and the slots of n anchors, by anchor.

    Args:
        anchors: rows of the first step.
    """

    def __init__(
        self, head: BlockHead, batch: Batch, anchors: StepRows, dtype: torch.dtype, ops: FusedOps
    ) -> None:
        self.head, self.batch, self.anchors, self.dtype = head, batch, anchors, dtype
        self.ops, self.eps = ops, head.config.rms_norm_eps
        self.num_anchors, self.num_slots = len(anchors.valid_rows), head.config.block_size
        positions = batch.positions.flatten()
        slots = torch.arange(1, self.num_slots + 1, device=positions.device)
        self.context_angles = head.rope.angles(positions)
        self.angles = head.rope.angles((positions[anchors.origin][:, None] + slots).flatten())
        self.starts = row_starts(document_starts(batch.documents), anchors)

    def run(self) -> Tensor:
        """Return the outputs [n · slots, H]."""
        head, dtype = self.head, self.dtype
        features = self.batch.features.flatten(0, 1).to(dtype)
        context = Shared(head.fc.weight.to(dtype)).product(features)
        context = self.normed(context, head.hidden_norm)
        newest = self.batch.tokens.flatten()[self.anchors.teacher_index]
        tokens = torch.cat([newest, newest.new_full((1,), head.mask_token_id)])
        hidden = head.embed(tokens).to(dtype)
        for layer, window in zip(head.layers, head.config.windows, strict=True):
            inputs = self.normed(hidden, layer.input_layernorm)
            hidden = self.layer(layer, inputs, hidden, context, window)
        return hidden

    def normed(self, rows: Tensor, norm: torch.nn.Module) -> Tensor:
        """Return a norm of rows."""
        return self.ops.normed((rows,), norm_weights(norm, self.dtype), self.eps)

    def layer(
        self,
        layer: DecoderLayer,
        inputs: Tensor,
        residual: Tensor,
        context: Tensor,
        window: int | None,
    ) -> Tensor:
        """Return the layer's outputs [n · slots, H].

        Args:
            inputs, residual: [n · slots, H], or [n + 1, H] while mask tokens share the last row.
            context: [T, H].
            window: of attention.
        """
        weights, ops = LayerWeights(layer, self.dtype), self.ops
        query, key_value = (
            self.expand_masks(product.product(inputs))
            for product in (weights.query, weights.key_value)
        )
        query = ops.queries((query, *self.angles), weights.query_norm, self.eps)
        attended = self.attend(
            query,
            self.keys_values(weights, weights.key_value.product(context), self.context_angles),
            self.keys_values(weights, key_value, self.angles),
            window,
        )
        return weights.run_output(ops, attended, self.expand_masks(residual), self.eps)

    def keys_values(
        self, weights: LayerWeights, product: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, each [rows, kv heads, head_dim]."""
        return self.ops.keys_values((product, *angles), weights.key_norm, self.eps)

    def expand_masks(self, x: Tensor) -> Tensor:
        """Return x [n · slots, …], with a row for each mask token if they share one in x."""
        if len(x) == self.num_anchors * self.num_slots:
            return x
        newest, masks = x.split([self.num_anchors, 1])
        masks = masks.expand(self.num_anchors, self.num_slots - 1, -1)
        return torch.cat([newest[:, None], masks], 1).flatten(0, 1)

    def attend(
        self,
        query: Tensor,
        context: tuple[Tensor, Tensor],
        block: tuple[Tensor, Tensor],
        window: int | None,
    ) -> Tensor:
        """Return attended values [n · slots, Q].

        Args:
            query: [n · slots, heads, head_dim].
            context: keys and values, [T, kv heads, head_dim].
            block: those of the slots, [n · slots, kv heads, head_dim].
        """
        anchors, shape = self.anchors, self.batch.tokens.shape
        query, *block = (
            pad_rows(x.unflatten(0, (-1, self.num_slots)), anchors) for x in (query, *block)
        )
        key, value = (x.unflatten(0, shape) for x in context)
        attended = block_attention(
            query,
            (key, value),
            tuple(block),
            anchors.index,
            self.starts,
            window=window,
            is_causal=self.head.config.is_causal,
        )
        slots = unpad_rows(attended.flatten(2), anchors).unflatten(1, (self.num_slots, -1))
        return slots.flatten(0, 1)
