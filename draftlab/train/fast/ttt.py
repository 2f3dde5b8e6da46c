"""`unroll` of an EAGLE3 head with less work and the same outputs and gradients (methods §2).

- The products of q, k and v with a token's normed embedding are computed once a token and shared by
  all steps. The norm's weights are folded into the projection, so that the frozen embeddings need
  no gradient: W (n ⊙ w) = (W ⊙ w) n.
- Only rows that carry loss are run. They are padded to a common length for attention alone.
- Weights and the operations between products are those of `train/fast/layers.py`.
- Steps can be recomputed in the backward pass, so that long rows need little memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftlab.heads.eagle3 import Eagle3Head, Eagle3Layer
from draftlab.heads.head import DraftHead
from draftlab.heads.layers import Attention
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


class FastUnroll(FastForward):
    """Fast forward pass of `unroll`."""

    description = "the embeddings' part of q, k and v is computed once a token"
    can_recompute = True

    @staticmethod
    def supports(head: DraftHead) -> bool:
        return (
            type(head) is Eagle3Head
            and len(head.layers) == 1
            and type(head.layer) is Eagle3Layer
            and type(head.layer.self_attn) is Attention
        )

    def outputs(self, head: Eagle3Head, batch: Batch, steps: list[StepRows]) -> list[Tensor]:
        outputs: list[Tensor] = []
        unrolled = _Unroll(head, batch, self.dtype, self.ops)
        output, step_keys = unrolled.projected, None
        for k in range(len(steps)):
            if self.recompute:
                results = checkpoint(unrolled.step, k, output, step_keys, use_reentrant=False)
            else:
                results = unrolled.step(k, output, step_keys)
            previous, output, step_keys = results
            outputs.append(previous)
        return [*outputs[1:], output]


class _Unroll:
    """The unroll of one batch: weights, products and keys that all steps share.

    A step has n rows that carry loss. Positions of the batch are flat, B · S.
    """

    def __init__(self, head: Eagle3Head, batch: Batch, dtype: torch.dtype, ops: FusedOps) -> None:
        self.head, self.batch, self.eps = head, batch, head.config.rms_norm_eps
        layer = head.layer
        # q, k and v read cat[embedding, hidden]; only the hidden half changes from step to step.
        halves = (weight.chunk(2, 1) for weight in qkv_weights(layer))
        embedding_weights, hidden_weights = zip(*halves, strict=True)
        self.weights = weights = LayerWeights(layer, dtype, ops, hidden_weights)
        self.starts = document_starts(batch.documents)
        positions = batch.positions.flatten()
        projection = (torch.cat(embedding_weights) * layer.input_layernorm.weight).to(dtype)
        embeddings = head.embed_tokens(batch.tokens).flatten(0, 1).to(dtype)
        embedded = Shared(F.linear(normed(embeddings, None, self.eps), projection))
        features = head.normed_features(batch.features.flatten(0, 1).to(dtype))
        projected = F.linear(features, head.fc.weight.to(dtype))
        # Row t of step k reads the token of slot t + 1 + k at position t + k.
        teachers = [rows.teacher_index for rows in batch.steps]
        angles = head.rope.angles(torch.cat([positions, positions[torch.cat(teachers)] - 1]))
        sizes = [len(positions), *map(len, teachers)]
        first, *self.angles = zip(*(x.split(sizes) for x in angles), strict=True)
        every = weights.projections(self.eps, layer.hidden_norm.weight)
        self.every = every = every._replace(
            embedded=embedded, norm_before_residual=layer.norm_before_residual
        )
        self.queries = every._replace(key_value=None)
        keys = every._replace(query=None)
        # Each position reads the token of the next one. The last position reads the first's; no
        # query sees its key.
        following = torch.arange(len(positions), device=positions.device).roll(-1)
        inputs = layer_inputs(keys, projected, first, index=following)
        self.projected = inputs.previous
        self.key, self.value = (
            x.unflatten(0, batch.tokens.shape) for x in (inputs.key, inputs.value)
        )

    def step(
        self, k: int, previous: Tensor, step_keys: StepKeyValues | None
    ) -> tuple[Tensor, Tensor, StepKeyValues | None]:
        """Run step k.

        Args:
            previous: output of the previous step; at step 0 the projected features.
            step_keys: keys and values of steps 1..k−1.

        Returns:
            `previous` (a branch point of the graph), the output [n, H], and `step_keys` up to k.
        """
        rows = self.batch.steps[k]
        projections = self.queries if k == 0 else self.every
        inputs = layer_inputs(
            projections, previous, self.angles[k], origin=rows.origin, index=rows.teacher_index
        )
        if k > 0:
            key_value = (pad_rows(x, rows) for x in (inputs.key, inputs.value))
            step_keys = StepKeyValues.extend(step_keys, *key_value, rows.select)
        query, starts = pad_rows(inputs.query, rows), row_starts(self.starts, rows)
        attended = ttt_attention(query, self.key, self.value, rows.index, starts, step_keys)
        attended = unpad_rows(attended, rows).flatten(1)
        output = self.weights.run_output(attended, inputs.residual, self.eps)
        return inputs.previous, self.head.output_norm(output), step_keys
