"""`unroll` of an EAGLE3 head with less work; the same outputs and gradients (METHODS §2).

- What q, k and v read of a token's embedding depends on the token alone: their products are made
  once a token and shared by all steps. The norm's weights go into the projection, so that the
  frozen embeddings need no gradient: W (n ⊙ w) = (W ⊙ w) n.
- Only rows that carry loss are run, also where other rows of the batch have more: they are padded
  for attention alone.
- Weights are cast once a batch, gate and up are one product, and what is neither a product nor
  attention is left to torch.compile.
- A step may be computed again in the backward pass, so that long rows need little memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from draftlab.data.packing import Batch, StepRows
from draftlab.heads.eagle3 import Eagle3Head, Eagle3Layer
from draftlab.heads.layers import Attention, rotate
from draftlab.kernels.ttt_attention import OwnKeys, document_starts, ttt_attention
from draftlab.train.objective import StepOutput, row_starts


class _Take(torch.autograd.Function):
    """Rows of x, each at most once: a gradient is written where index_select's would be added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        whole = gradient.new_zeros(ctx.length, *gradient.shape[1:])
        return whole.index_copy_(0, index, gradient), None


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
        rows: normed hidden state [n, H], the embedding's part [n, Q], cosines, sines (`Rope`).
        weights: [Q, H], norm of queries or None.
    """
    hidden, embedded, *angles = rows
    query = (embedded + F.linear(hidden, weights[0])).unflatten(-1, (-1, 2 * angles[0].shape[-1]))
    return rotate(query if weights[1] is None else normed((query,), weights[1:], eps), angles)


def keys_values(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """Rotated keys and values, each [n, kv heads, head_dim]; arguments as of `queries`."""
    hidden, embedded, *angles = rows
    made = (embedded + F.linear(hidden, weights[0])).unflatten(-1, (-1, 2 * angles[0].shape[-1]))
    key, value = made.chunk(2, 1)
    return rotate(key if weights[1] is None else normed((key,), weights[1:], eps), angles), value


def layer_output(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """`DecoderLayer.output` [n, H].

    Args:
        rows: attended values [n, Q], residual [n, H].
        weights: o [H, Q], the norm behind it, gate and up [2 I, H], down [H, I].
    """
    (attended, residual), (output, norm, gate_up, down) = rows, weights
    hidden = residual + F.linear(attended, output)
    gate, up = F.linear(normed((hidden,), (norm,), eps), gate_up).chunk(2, -1)
    return hidden + F.linear(F.silu(gate) * up, down)


PIECES = (normed, queries, keys_values, layer_output)


@dataclass(frozen=True)
class LayerWeights:
    """A layer's weights in the products' dtype, as the pieces take them.

    Attributes:
        embedded: [Q + 2 KV, H], of q, k and v, what reads the normed embedding, its norm inside.
    """

    embedded: Tensor
    hidden: Weights
    queries: Weights
    keys_values: Weights
    output: Weights

    @classmethod
    def of(cls, layer: Eagle3Layer, dtype: torch.dtype) -> LayerWeights:
        """Of a layer, with gradients to its parameters."""
        attention, mlp = layer.self_attn, layer.mlp
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        embedding, (query, key, value) = zip(
            *(p.weight.chunk(2, 1) for p in projections), strict=True
        )
        scale = layer.input_layernorm.weight
        of_norm = lambda norm: None if norm is None else norm.weight.to(dtype)  # noqa: E731
        stacked = lambda *parts: torch.cat([part.to(dtype) for part in parts])  # noqa: E731
        return cls(
            stacked(*(part * scale for part in embedding)),
            (of_norm(layer.hidden_norm),),
            (query.to(dtype), of_norm(attention.q_norm)),
            (stacked(key, value), of_norm(attention.k_norm)),
            (
                attention.o_proj.weight.to(dtype),
                of_norm(layer.post_attention_layernorm),
                stacked(mlp.gate_proj.weight, mlp.up_proj.weight),
                mlp.down_proj.weight.to(dtype),
            ),
        )


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
        found: list[StepOutput] = []
        # All is of one dtype already. Autocast would widen norms, and cast again what reads them.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            unrolled = _Unrolled(head, batch, self.dtype, self.pieces)
            output, own = unrolled.fused, None
            for k, rows in enumerate(batch.steps):
                if rows.index.shape[1] == 0:
                    break
                if self.recompute:
                    output, own = checkpoint(unrolled.step, k, output, own, use_reentrant=False)
                else:
                    output, own = unrolled.step(k, output, own)
                found.append(StepOutput(output, rows.teacher))
        return found


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
        self.normed, self.queries, self.keys_values, self.output = pieces
        self.weights = weights = LayerWeights.of(head.layer, dtype)
        self.starts = document_starts(batch.documents)
        self.positions = batch.positions.flatten()
        self.num_queries = len(weights.queries[0])
        embeddings = head.embed_tokens(batch.tokens).flatten(0, 1).to(dtype)
        self.embedded = F.linear(normed((embeddings,), (None,), self.eps), weights.embedded)
        features = head.normed_features(batch.features.flatten(0, 1).to(dtype))
        self.fused = F.linear(features, head.fc.weight.to(dtype))
        hidden = self.normed((self.fused,), weights.hidden, self.eps)
        # The slot behind each one. The last reads the first in its place; nothing sees its key.
        following = torch.arange(len(hidden), device=hidden.device).roll(-1)
        read = self._of_tokens(following, self.positions, slice(self.num_queries, None))
        made = self.keys_values((hidden, *read), weights.keys_values, self.eps)
        self.key, self.value = (x.unflatten(0, batch.tokens.shape) for x in made)

    def step(self, k: int, output: Tensor, own: OwnKeys | None) -> tuple[Tensor, OwnKeys | None]:
        """Output [n, H] of step k, and the own keys up to it.

        Args:
            output: of the step before; at step 0 `fused`.
            own: up to the step before.
        """
        rows, weights, head = self.batch.steps[k], self.weights, self.head
        hidden = _Take.apply(output, rows.origin)
        read = self.normed((hidden,), weights.hidden, self.eps)
        # Row t reads the token of slot t + 1 + k at position t + k.
        positions = self.positions[rows.teacher] - 1
        embedded, *angles = self._of_tokens(rows.teacher, positions, slice(None))
        asked = (read, embedded[:, : self.num_queries], *angles)
        query = self.queries(asked, weights.queries, self.eps)
        if k > 0:
            given = (read, embedded[:, self.num_queries :], *angles)
            made = self.keys_values(given, weights.keys_values, self.eps)
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
        made = self.output((_real(attended.flatten(2), rows), residual), weights.output, self.eps)
        return head.finish(made), own

    def _of_tokens(self, slots: Tensor, positions: Tensor, part: slice) -> Rows:
        """Of tokens in slots [n], each another: projected embeddings, and angles of positions."""
        angles = self.head.rope.angles(positions)
        return _Take.apply(self.embedded[:, part], slots), *angles


def _padded(x: Tensor, rows: StepRows) -> Tensor:
    """x [n, …] at the places [B, R, …] of its rows; shapes say whether there are others."""
    size = rows.index.numel()
    if len(x) < size:
        x = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.loss, x)
    return x.unflatten(0, rows.index.shape)


def _real(x: Tensor, rows: StepRows) -> Tensor:
    """Rows [n, …] of x [B, R, …]."""
    flat = x.flatten(0, 1)
    return _Take.apply(flat, rows.loss) if len(rows.loss) < len(flat) else flat
