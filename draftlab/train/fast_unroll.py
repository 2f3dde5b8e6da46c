"""`unroll` of an EAGLE3 head with less work; the same outputs and gradients (METHODS §2).

- What q, k and v read of a token's embedding depends on the token alone: their products are made
  once a token and shared by all steps. The norm's weights go into the projection, so that the
  frozen embeddings need no gradient: W (n ⊙ w) = (W ⊙ w) n.
- Only rows that carry loss are run, also where other rows of the batch have more: they are padded
  for attention alone.
- Weights are cast once a batch, gate and up are one product, all steps add to one gradient of them
  (`train/shared.py`), and what is neither a product nor attention is left to torch.compile.
- A step may be computed again in the backward pass, so that long rows need little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftlab.data.packing import Batch, StepRows
from draftlab.heads.eagle3 import Eagle3Head, Eagle3Layer
from draftlab.heads.layers import Attention, rotate
from draftlab.kernels.ttt_attention import OwnKeys, document_starts, ttt_attention
from draftlab.train.objective import StepOutput, row_starts
from draftlab.train.shared import Shared, branch

Rows = tuple[Tensor, ...]
"""Tensors whose first dimension is that of the rows at hand."""
Weights = tuple[Tensor | None, ...]


def fits(head: object) -> bool:
    """Whether `FastUnroll` knows the head: one EAGLE3 layer with plain attention."""
    return (
        type(head) is Eagle3Head
        and len(head.layers) == 1
        and type(head.layer) is Eagle3Layer
        and type(head.layer.self_attn) is Attention
    )


def normed(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """RMS norm over the last dimension of rows (x,) by weights (w,)."""
    return F.rms_norm(rows[0], rows[0].shape[-1:], weights[0], eps)


def queries(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """Rotated queries [n, heads, head_dim].

    Args:
        rows: products with the normed hidden state and with the embedding, [n, Q] each, cosines,
            sines (`Rope`).
        weights: norm of queries or None.
    """
    hidden, embedded, *angles = rows
    query = (embedded + hidden).unflatten(-1, (-1, 2 * angles[0].shape[-1]))
    return rotate(query if weights[0] is None else normed((query,), weights, eps), angles)


def keys_values(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """Rotated keys and values, each [n, kv heads, head_dim]; arguments as of `queries`."""
    hidden, embedded, *angles = rows
    made = (embedded + hidden).unflatten(-1, (-1, 2 * angles[0].shape[-1]))
    key, value = made.chunk(2, 1)
    return rotate(key if weights[0] is None else normed((key,), weights, eps), angles), value


def joined(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of rows (x, y), and that normed by weights (w,), each [n, H]."""
    hidden = rows[0] + rows[1]
    return hidden, normed((hidden,), weights, eps)


def gated(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """silu(gate) · up [n, I] of rows (their product [n, 2 I],)."""
    gate, up = rows[0].chunk(2, -1)
    return F.silu(gate) * up


PIECES = (normed, queries, keys_values, joined, gated)


class LayerWeights:
    """A layer's weights in the products' dtype, with gradients to its parameters.

    Attributes:
        embedded: [Q + 2 KV, H], of q, k and v, what reads the normed embedding, its norm inside.
        query, key_value, output, gate_up, down: as their products read them.
        hidden_norm, query_norm, key_norm, output_norm: of vectors, as the pieces take them.
    """

    def __init__(self, layer: Eagle3Layer, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        embedding, (query, key, value) = zip(
            *(p.weight.chunk(2, 1) for p in projections), strict=True
        )
        scale = layer.input_layernorm.weight

        def stacked(*parts: Tensor) -> Tensor:
            return torch.cat([part.to(dtype) for part in parts])

        def of_norm(norm: Any) -> Weights:
            return (None if norm is None else norm.weight.to(dtype),)

        self.embedded = stacked(*(part * scale for part in embedding))
        self.query = Shared(query.to(dtype))
        self.key_value = Shared(stacked(key, value))
        self.output = Shared(attention.o_proj.weight.to(dtype))
        self.gate_up = Shared(stacked(mlp.gate_proj.weight, mlp.up_proj.weight))
        self.down = Shared(mlp.down_proj.weight.to(dtype))
        self.hidden_norm = of_norm(layer.hidden_norm)
        self.query_norm, self.key_norm = of_norm(attention.q_norm), of_norm(attention.k_norm)
        self.output_norm = of_norm(layer.post_attention_layernorm)


class FastUnroll:
    """Callable as `unroll`.

    Args:
        dtype: of products, of norms and of what is kept for the backward pass.
        recompute: whether steps are computed again in the backward pass in place of being kept.
        pieces: `PIECES`, or the same compiled.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        recompute: bool = False,
        pieces: tuple[Callable[..., Any], ...] = PIECES,
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
        return [StepOutput(each, rows.teacher) for each, rows in taught] if outputs else []


class _Unrolled:
    """What the steps of a batch share; n rows are those that carry loss, S slots of B rows flat."""

    def __init__(
        self,
        head: Eagle3Head,
        batch: Batch,
        dtype: torch.dtype,
        pieces: tuple[Callable[..., Any], ...],
    ) -> None:
        self.head, self.batch, self.eps = head, batch, head.config.rms_norm_eps
        self.normed, self.queries, self.keys_values, self.joined, self.gated = pieces
        self.weights = weights = LayerWeights(head.layer, dtype)
        self.starts = document_starts(batch.documents)
        self.positions = batch.positions.flatten()
        num_queries = len(weights.query.tensor)
        self.of_queries, self.of_keys = slice(num_queries), slice(num_queries, None)
        embeddings = head.embed_tokens(batch.tokens).flatten(0, 1).to(dtype)
        embeddings = normed((embeddings,), (None,), self.eps)
        self.embedded = Shared(F.linear(embeddings, weights.embedded))
        features = head.normed_features(batch.features.flatten(0, 1).to(dtype))
        self.fused = F.linear(features, head.fc.weight.to(dtype))
        hidden = self.normed((self.fused,), weights.hidden_norm, self.eps)
        # The slot behind each one. The last reads the first in its place; nothing sees its key.
        following = torch.arange(len(hidden), device=hidden.device).roll(-1)
        read = self.embedded.rows(following, self.of_keys)
        given = (weights.key_value.product(hidden), read, *self.head.rope.angles(self.positions))
        made = self.keys_values(given, weights.key_norm, self.eps)
        self.key, self.value = (x.unflatten(0, batch.tokens.shape) for x in made)

    def step(
        self, k: int, output: Tensor, own: OwnKeys | None
    ) -> tuple[Tensor, Tensor, OwnKeys | None]:
        """Output [n, H] of step k, and the own keys up to it; before them the output it was given.

        Args:
            output: of the step before; at step 0 `fused`.
            own: up to the step before.
        """
        rows, weights, head = self.batch.steps[k], self.weights, self.head
        output, hidden = branch(output, rows.origin)
        read = self.normed((hidden,), weights.hidden_norm, self.eps)
        # Row t reads the token of slot t + 1 + k at position t + k.
        angles = head.rope.angles(self.positions[rows.teacher] - 1)
        embedded = self.embedded.rows(rows.teacher, self.of_queries)
        asked = (weights.query.product(read), embedded, *angles)
        query = self.queries(asked, weights.query_norm, self.eps)
        if k > 0:
            embedded = self.embedded.rows(rows.teacher, self.of_keys)
            given = (weights.key_value.product(read), embedded, *angles)
            made = self.keys_values(given, weights.key_norm, self.eps)
            own = OwnKeys.extended(own, *(_padded(x, rows) for x in made), rows.select)
        attended = ttt_attention(
            _padded(query, rows),
            self.key,
            self.value,
            rows.index,
            row_starts(self.starts, rows),
            own,
        )
        residual = read if head.layer.norm_before_residual else hidden
        attended = weights.output.product(_real(attended.flatten(2), rows))
        hidden, read = self.joined((residual, attended), weights.output_norm, self.eps)
        inner = self.gated((weights.gate_up.product(read),), (), self.eps)
        return output, head.finish(hidden + weights.down.product(inner)), own


def _padded(x: Tensor, rows: StepRows) -> Tensor:
    """x [n, …] at the places [B, R, …] of its rows; shapes say whether there are others."""
    size = rows.index.numel()
    if len(x) < size:
        x = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.loss, x)
    return x.unflatten(0, rows.index.shape)


def _real(x: Tensor, rows: StepRows) -> Tensor:
    """Rows [n, …] of x [B, R, …]."""
    flat = x.flatten(0, 1)
    return branch(flat, rows.loss)[1] if len(rows.loss) < len(flat) else flat
