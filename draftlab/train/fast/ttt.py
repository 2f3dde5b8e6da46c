"""`unroll` of an EAGLE3 head with less work and the same outputs and gradients (methods §2).

- The products of q, k and v with a token's normed embedding are computed once a token and shared by
  all steps. The norm's weights are folded into the projection, so that the frozen embeddings need
  no gradient: W (n ⊙ w) = (W ⊙ w) n.
- Only rows that carry loss are run. They are padded to a common length for attention alone. All
  layers but the last run step 0 at every position.
- Weights and the operations between products are those of `train/fast/layers.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.eagle3 import Eagle3Head
from draftlab.heads.head import DraftHead
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.fused_ops import FusedOps, normed
from draftlab.train.fast.layers import (
    FastForward,
    LayerWeights,
    layer_inputs,
    pad_rows,
    qkv_weights,
    unpad_rows,
)
from draftlab.train.fast.shared_gradients import Shared
from draftlab.train.objectives.loss import row_starts
from draftlab.train.objectives.ttt import window_starts


class FastUnroll(FastForward):
    """Fast forward pass of `unroll`."""

    description = "the embeddings' part of q, k and v is computed once a token"

    @staticmethod
    def supports(head: DraftHead) -> bool:
        return type(head) is Eagle3Head

    def outputs(self, head: Eagle3Head, batch: Batch, steps: list[StepRows]) -> list[Tensor]:
        outputs: list[Tensor] = []
        unrolled = _Unroll(head, batch, self.dtype, self.ops)
        output = unrolled.every_position()
        for k in range(len(steps)):
            previous, output = unrolled.step(k, output)
            outputs.append(previous)
        return [*outputs[1:], output]


class _Unroll:
    """The unroll of one batch: weights, products and keys that all steps share.

    A step has n rows that carry loss. Positions of the batch are flat, B · S.
    """

    def __init__(self, head: Eagle3Head, batch: Batch, dtype: torch.dtype, ops: FusedOps) -> None:
        self.head, self.batch, self.eps = head, batch, head.config.rms_norm_eps
        first, *later = head.layers
        # q, k and v read cat[embedding, hidden]; only the hidden half changes from step to step.
        halves = (weight.chunk(2, 1) for weight in qkv_weights(first))
        embedding_weights, hidden_weights = zip(*halves, strict=True)
        self.weights = [
            LayerWeights(first, dtype, ops, hidden_weights),
            *(LayerWeights(layer, dtype, ops) for layer in later),
        ]
        self.starts = document_starts(batch.documents)
        positions = batch.positions.flatten()
        projection = (torch.cat(embedding_weights) * first.input_layernorm.weight).to(dtype)
        embeddings = head.embed_tokens(batch.tokens).flatten(0, 1).to(dtype)
        embedded = Shared(F.linear(normed(embeddings, None, self.eps), projection))
        features = head.normed_features(batch.features.flatten(0, 1).to(dtype))
        self.projected = F.linear(features, head.fc.weight.to(dtype))
        # Row t of step k reads the token of slot t + 1 + k at position t + k.
        teachers = [rows.teacher_index for rows in batch.steps]
        angles = head.rope.angles(torch.cat([positions, positions[torch.cat(teachers)] - 1]))
        sizes = [len(positions), *map(len, teachers)]
        self.every_angle, *self.angles = zip(*(x.split(sizes) for x in angles), strict=True)
        norms = [first.hidden_norm, *(layer.input_layernorm for layer in later)]
        self.projections = [
            weights.projections(self.eps, norm.weight)
            for weights, norm in zip(self.weights, norms, strict=True)
        ]
        self.projections[0] = self.projections[0]._replace(
            embedded=embedded, norm_before_residual=first.norm_before_residual
        )
        # For each layer, keys and values of step 0, and of the later steps that have run.
        self.keys: list[tuple[Tensor, Tensor]] = []
        self.step_keys: list[StepKeyValues | None] = [None] * len(head.layers)

    def every_position(self) -> Tensor:
        """Run step 0 up to the keys of the last layer, and return this layer's input [B · S, H]."""
        hidden, shape = self.projected, self.batch.tokens.shape
        everywhere = torch.arange(len(hidden), device=hidden.device)
        # Each position reads the token of the next one. The last position reads the first's; no
        # query sees its key.
        index, origin = everywhere.roll(-1), everywhere
        for weights, projections in zip(self.weights, self.projections, strict=True):
            last = weights is self.weights[-1]
            inputs = layer_inputs(
                projections._replace(query=None) if last else projections,
                hidden,
                self.every_angle,
                origin=None if last else origin,
                index=index,
            )
            self.keys.append((inputs.key.unflatten(0, shape), inputs.value.unflatten(0, shape)))
            if last:
                return inputs.previous
            query, slots = inputs.query.unflatten(0, shape), everywhere[: shape[1]].expand(shape)
            starts = window_starts(self.starts, slots, 0, self.head.layer.window)
            attended = ttt_attention(query, *self.keys[-1], slots, starts, None)
            residual = inputs.previous if inputs.residual is None else inputs.residual
            hidden = weights.run_output(attended.flatten(0, 1).flatten(1), residual, self.eps)
            index = origin = None
        raise AssertionError("a head has a layer")

    def step(self, k: int, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Run step k on the output of the previous step; at step 0 on the last layer's input.

        Returns:
            `previous`, as a branch point of the graph, and the output [n, H].
        """
        rows, step_keys = self.batch.steps[k], self.step_keys
        starts = row_starts(self.starts, rows)
        starts = window_starts(starts, rows.index, k, self.head.layer.window)
        hidden, origin = previous, rows.origin
        for number in range(len(self.weights) - 1 if k == 0 else 0, len(self.weights)):
            projections = self.projections[number]
            inputs = layer_inputs(
                projections._replace(key_value=None) if k == 0 else projections,
                hidden,
                self.angles[k],
                origin=origin,
                index=rows.teacher_index if number == 0 else None,
            )
            if origin is not None:
                previous = inputs.previous
            if k > 0:
                key_value = (pad_rows(x, rows) for x in (inputs.key, inputs.value))
                step_keys[number] = StepKeyValues.extend(step_keys[number], *key_value, rows.select)
            query = pad_rows(inputs.query, rows)
            attended = ttt_attention(
                query, *self.keys[number], rows.index, starts, step_keys[number]
            )
            attended = unpad_rows(attended, rows).flatten(1)
            residual = inputs.previous if inputs.residual is None else inputs.residual
            hidden, origin = self.weights[number].run_output(attended, residual, self.eps), None
        return previous, self.head.output_norm(hidden)
