"""`parallel_outputs` with less work and the same outputs and gradients (methods §4).

Depth 0 at every position and all masked slots are rows of one tensor, so that a layer runs each
product once. Up to the first layer's attention all masked slots are equal and share one row.
Padding rows exist in attention only. Weights and the operations between products are those of
`train/fast/layers.py`.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Layer
from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import Attention
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.ttt_attention import document_starts, ttt_attention
from draftlab.kernels.ttt_attention_types import StepKeyValues
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.fused_ops import FUSED_OPS, FusedOps, Rows
from draftlab.train.fast.layers import (
    LayerWeights,
    norm_weights,
    pad_rows,
    unpad_rows,
)
from draftlab.train.fast.shared_gradients import Shared, branch
from draftlab.train.objectives.loss import StepOutput, row_starts


class FastParallel:
    """Fast forward pass with the signature of `parallel_outputs`.

    Args:
        dtype: of products, norms and saved activations.
        ops: `FUSED_OPS`, or the same compiled.
    """

    description = "all depths run side by side"
    can_recompute = False

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether the head is a parallel one whose layers have plain attention."""
        return (
            type(head) is PeagleHead
            and type(head.layer) is Eagle3Layer
            and all(type(layer) is DecoderLayer for layer in head.layers[1:])
            and all(type(layer.self_attn) is Attention for layer in head.layers)
        )

    def __init__(self, dtype: torch.dtype, *, ops: FusedOps = FUSED_OPS) -> None:
        self.dtype, self.ops = dtype, ops

    def __call__(self, head: PeagleHead, batch: Batch) -> list[StepOutput]:
        """Return each depth's output."""
        steps = [rows for rows in batch.steps if rows.index.shape[1]]
        if not steps:
            return []
        # All tensors have one dtype already. Autocast would widen norms and cast their readers.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            output = _ParallelPass(head, batch, steps, self.dtype, self.ops).run()
        outputs = output.split([len(rows.valid_rows) for rows in steps])
        return [StepOutput(o, rows.teacher_index) for o, rows in zip(outputs, steps, strict=True)]


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
        self.depth_sizes = [len(rows.valid_rows) for rows in steps[1:]]
        self.num_masked = sum(self.depth_sizes)
        masked_positions = [positions[rows.teacher_index] - 1 for rows in steps[1:]]
        self.angles = head.rope.angles(torch.cat([positions, *masked_positions]))
        self.starts = document_starts(batch.documents)
        self.step_starts = [row_starts(self.starts, rows) for rows in steps]

    def run(self) -> Tensor:
        """Return the outputs [N_0 + M, H] at the rows that carry loss, sorted by depth."""
        layers = self.head.layers
        hidden = self.layer(layers[0], *self.inputs(), last=len(layers) == 1)
        for number, layer in enumerate(layers[1:], 2):
            norm = norm_weights(layer.input_layernorm, self.dtype)
            inputs = self.ops.normed((hidden,), norm, self.eps)
            hidden = self.layer(layer, inputs, hidden, last=number == len(layers))
        return hidden

    def inputs(self) -> Rows:
        """Return the first layer's inputs of attention [T + 1, 2H] and residual [T + 1, H].

        All masked slots share the last row.
        """
        head, layer, dtype = self.head, self.head.layer, self.dtype
        fc, features = Shared(head.fc.weight.to(dtype)), self.batch.features.flatten(0, 1)
        hidden = torch.cat(
            [fc.product(head.normed_features(x.to(dtype))) for x in (features, head.mask_hidden)]
        )
        next_tokens = self.batch.tokens.roll(-1, dims=1).flatten()
        embeddings = head.embed(next_tokens), head.mask_embedding[None]
        embeddings = torch.cat([x.to(dtype) for x in embeddings])
        normed = [
            self.ops.normed((rows,), norm_weights(norm, dtype), self.eps)
            for rows, norm in ((embeddings, layer.input_layernorm), (hidden, layer.hidden_norm))
        ]
        return torch.cat(normed, -1), normed[1] if layer.norm_before_residual else hidden

    def layer(self, layer: DecoderLayer, inputs: Tensor, residual: Tensor, *, last: bool) -> Tensor:
        """Return the layer's outputs [T + M, H].

        The last layer computes depth 0 only at rows that carry loss: [N_0 + M, H].

        Args:
            inputs, residual: T + M rows, or T + 1 while masked slots share one.
        """
        weights, ops, query_inputs = LayerWeights(layer, self.dtype), self.ops, inputs
        num_first, angles, rows = self.num_positions, self.angles, None
        if last:  # keys of depth 0 are read at every position, its outputs only at these rows
            rows = self.steps[0]
            num_first = len(rows.origin)
            masked = torch.arange(self.num_positions, len(inputs), device=inputs.device)
            index = torch.cat([rows.origin, masked])
            inputs, query_inputs = branch(inputs, index)
            residual = branch(residual, index)[1]
            angles = tuple(torch.cat([x[rows.origin], x[self.num_positions :]]) for x in angles)
        key_value = self.expand_masked(weights.key_value.product(inputs), self.num_positions)
        query = self.expand_masked(weights.query.product(query_inputs), num_first)
        key_value = ops.keys_values((key_value, *self.angles), weights.key_norm, self.eps)
        query = ops.queries((query, *angles), weights.query_norm, self.eps)
        attended = self.attend(query, *key_value, rows)
        residual = self.expand_masked(residual, num_first)
        return weights.run_output(ops, attended, residual, self.eps)

    def expand_masked(self, x: Tensor, num_first: int) -> Tensor:
        """Return x [num_first + M, …], with a row for each masked slot if they share one in x."""
        if len(x) - num_first == self.num_masked:
            return x
        rows, shared = x.split([num_first, len(x) - num_first])
        return torch.cat([rows, shared.expand(self.num_masked, -1)])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, rows: StepRows | None) -> Tensor:
        """Return attended values [n, Q] of queries [n, heads, head_dim].

        Args:
            key, value: [T + M, kv heads, head_dim].
            rows: rows of depth 0 that have queries; None: all positions.
        """
        shape = self.batch.tokens.shape
        # A single split of each tensor: its gradient is concatenated once.
        by_depth = [
            x.split([len(x) - self.num_masked, *self.depth_sizes]) for x in (query, key, value)
        ]
        query, key, value = (depths[0] for depths in by_depth)
        key, value = key.unflatten(0, shape), value.unflatten(0, shape)
        if rows is None:
            index = torch.arange(shape[1], device=query.device).expand(shape)
            query, starts = query.unflatten(0, shape), self.starts
        else:
            index, starts, query = rows.index, self.step_starts[0], pad_rows(query, rows)
        output = ttt_attention(query, key, value, index, starts).flatten(2)
        attended = [output.flatten(0, 1) if rows is None else unpad_rows(output, rows)]
        step_keys = None
        depths = zip(self.steps, self.step_starts, *by_depth, strict=True)
        for rows, starts, *tensors in islice(depths, 1, None):
            query, *key_value = (pad_rows(x, rows) for x in tensors)
            step_keys = StepKeyValues.extend(step_keys, *key_value, rows.select)
            output = ttt_attention(query, key, value, rows.index, starts, step_keys)
            attended.append(unpad_rows(output.flatten(2), rows))
        return torch.cat(attended)
