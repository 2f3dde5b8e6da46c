"""`unroll` of an EAGLE3 head with less work; the same outputs and gradients (methods §2).

- What q, k and v read of a token's embedding depends on the token alone: their products are made
  once a token and shared by all steps. The norm's weights go into the projection, so that the
  frozen embeddings need no gradient: W (n ⊙ w) = (W ⊙ w) n.
- Only rows that carry loss are run, also where other rows of the batch have more: they are padded
  for attention alone.
- Products, and what is between them, are those of `train/fast/layers.py`.
- A step may be computed again in the backward pass, so that long rows need little memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftlab.heads.eagle3 import Eagle3Head, Eagle3Layer
from draftlab.heads.head import DraftHead
from draftlab.heads.layers import Attention
from draftlab.kernels.ttt_attention import document_starts, ttt_attention
from draftlab.kernels.ttt_attention_types import StepKeyValues
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.layers import (
    PIECES,
    LayerWeights,
    Pieces,
    normed,
    of_norm,
    padded,
    projections,
    real,
    stacked,
)
from draftlab.train.fast.shared_gradients import Shared, branch
from draftlab.train.objectives.loss import StepOutput, row_starts


class FastUnroll:
    """Callable as `unroll`.

    Args:
        dtype: of products, of norms and of what is kept for the backward pass.
        recompute: whether steps are computed again in the backward pass in place of being kept.
        pieces: `PIECES`, or the same compiled.
    """

    description = "the embeddings' part of q, k and v is computed once a token"
    can_recompute = True

    @staticmethod
    def supports(head: DraftHead) -> bool:
        """Return whether the head is one EAGLE3 layer with plain attention."""
        return (
            type(head) is Eagle3Head
            and len(head.layers) == 1
            and type(head.layer) is Eagle3Layer
            and type(head.layer.self_attn) is Attention
        )

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        pieces: Pieces = PIECES,
    ) -> None:
        self.dtype, self.recompute, self.pieces = dtype, recompute, pieces

    def __call__(self, head: Eagle3Head, batch: Batch) -> list[StepOutput]:
        """Each step's output; gradients flow through all earlier steps."""
        outputs: list[Tensor] = []
        # All is of one dtype already. Autocast would widen norms, and cast again what reads them.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            unrolled = _Unrolled(head, batch, self.dtype, self.pieces)
            output, own = unrolled.fused, None
            for k, rows in enumerate(batch.steps):
                if rows.index.shape[1] == 0:
                    break
                if self.recompute:
                    made = checkpoint(unrolled.step, k, output, own, use_reentrant=False)
                else:
                    made = unrolled.step(k, output, own)
                before, output, own = made
                outputs.append(before)
        taught = zip([*outputs[1:], output], batch.steps, strict=False)
        return [StepOutput(each, rows.teacher_index) for each, rows in taught] if outputs else []


class _Unrolled:
    """What the steps of a batch share; n rows are those that carry loss, S slots of B rows flat."""

    def __init__(
        self,
        head: Eagle3Head,
        batch: Batch,
        dtype: torch.dtype,
        pieces: Pieces,
    ) -> None:
        self.head, self.batch, self.eps = head, batch, head.config.rms_norm_eps
        self.pieces, layer = pieces, head.layer
        # cat[embedding, hidden]: the second half is multiplied in every step.
        halves = (weight.chunk(2, 1) for weight in projections(layer))
        of_embeddings, of_hidden = zip(*halves, strict=True)
        self.weights = weights = LayerWeights(layer, dtype, of_hidden)
        self.hidden_norm = of_norm(layer.hidden_norm, dtype)
        self.starts = document_starts(batch.documents)
        self.positions = batch.positions.flatten()
        num_queries = len(of_hidden[0])
        self.of_queries, self.of_keys = slice(num_queries), slice(num_queries, None)
        scale = layer.input_layernorm.weight  # in the projection, not in the norm
        projection = stacked([weight * scale for weight in of_embeddings], dtype)
        embeddings = head.embed_tokens(batch.tokens).flatten(0, 1).to(dtype)
        self.embedded = Shared(F.linear(normed((embeddings,), (None,), self.eps), projection))
        features = head.normed_features(batch.features.flatten(0, 1).to(dtype))
        self.fused = F.linear(features, head.fc.weight.to(dtype))
        hidden = pieces.normed((self.fused,), self.hidden_norm, self.eps)
        # The slot behind each one. The last reads the first in its place; nothing sees its key.
        following = torch.arange(len(hidden), device=hidden.device).roll(-1)
        read = self.embedded.rows(following, self.of_keys)
        given = (weights.key_value.product(hidden), read, *head.rope.angles(self.positions))
        made = pieces.keys_values(given, weights.key_norm, self.eps)
        self.key, self.value = (x.unflatten(0, batch.tokens.shape) for x in made)

    def step(
        self, k: int, output: Tensor, own: StepKeyValues | None
    ) -> tuple[Tensor, Tensor, StepKeyValues | None]:
        """Output [n, H] of step k, and the own keys up to it; before them the output it was given.

        Args:
            output: of the step before; at step 0 `fused`.
            own: up to the step before.
        """
        rows, weights, head, pieces = self.batch.steps[k], self.weights, self.head, self.pieces
        output, hidden = branch(output, rows.origin)
        read = pieces.normed((hidden,), self.hidden_norm, self.eps)
        # Row t reads the token of slot t + 1 + k at position t + k.
        angles = head.rope.angles(self.positions[rows.teacher_index] - 1)
        embedded = self.embedded.rows(rows.teacher_index, self.of_queries)
        asked = (weights.query.product(read), embedded, *angles)
        query = pieces.queries(asked, weights.query_norm, self.eps)
        if k > 0:
            embedded = self.embedded.rows(rows.teacher_index, self.of_keys)
            given = (weights.key_value.product(read), embedded, *angles)
            made = pieces.keys_values(given, weights.key_norm, self.eps)
            own = StepKeyValues.extend(own, *(padded(x, rows) for x in made), rows.select)
        attended = ttt_attention(
            padded(query, rows),
            self.key,
            self.value,
            rows.index,
            row_starts(self.starts, rows),
            own,
        )
        residual = read if head.layer.norm_before_residual else hidden
        attended = real(attended.flatten(2), rows)
        made = weights.run_output(pieces, attended, residual, self.eps)
        return output, head.output_norm(made), own
