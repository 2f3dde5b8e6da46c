"""What the fast ways of running heads share: a layer's weights, the pieces between products.

Weights are cast once a batch, gate and up are one product as key and value are, all uses of weights
add to one gradient of them (`train/fast/shared_gradients.py`), and what is neither a product nor
attention, but for the gate, is in `Pieces`, which torch.compile makes a few kernels of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.head import DecoderLayer
from draftlab.heads.layers import rotate
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.fast.shared_gradients import Shared, branch

Rows = tuple[Tensor, ...]
"""Tensors whose first dimension is that of the rows at hand."""
Weights = tuple[Tensor | None, ...]


def normed(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """RMS norm over the last dimension of rows (x,) by weights (w,)."""
    return F.rms_norm(rows[0], rows[0].shape[-1:], weights[0], eps)


def queries(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """Rotated queries [n, heads, head_dim].

    Args:
        rows: one or two products [n, Q] that are added, cosines, sines (`Rope`).
        weights: norm of queries or None.
    """
    *made, cosines, sines = rows
    query = sum(made[1:], made[0]).unflatten(-1, (-1, 2 * cosines.shape[-1]))
    return rotate(query if weights[0] is None else normed((query,), weights, eps), (cosines, sines))


def keys_values(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """Rotated keys and values, each [n, kv heads, head_dim]; arguments as of `queries`."""
    *made, cosines, sines = rows
    both = sum(made[1:], made[0]).unflatten(-1, (-1, 2 * cosines.shape[-1]))
    key, value = both.chunk(2, 1)
    key = key if weights[0] is None else normed((key,), weights, eps)
    return rotate(key, (cosines, sines)), value


def joined(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of rows (x, y), and that normed by weights (w,), each [n, H]."""
    hidden = rows[0] + rows[1]
    return hidden, normed((hidden,), weights, eps)


class Pieces(NamedTuple):
    """The functions above, or the same compiled; each takes rows, weights and an epsilon."""

    normed: Callable[..., Any] = normed
    queries: Callable[..., Any] = queries
    keys_values: Callable[..., Any] = keys_values
    joined: Callable[..., Any] = joined


PIECES = Pieces()


def of_norm(norm: Any, dtype: torch.dtype) -> Weights:
    """A norm's weights as the pieces take them."""
    return (None if norm is None else norm.weight.to(dtype),)


def stacked(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights below each other, in the products' dtype."""
    return torch.cat([part.to(dtype) for part in parts])


def projections(layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of q, k and v."""
    attention = layer.self_attn
    return attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight


class LayerWeights:
    """A layer's weights in the products' dtype, with gradients to its parameters.

    Each is cast where it is first read. Autograd runs what was made later first: so its gradient is
    whole, and on its way to other ranks, before the backward pass goes on to what was made earlier.

    Attributes:
        query_norm, key_norm, output_norm: vectors, as the pieces take them.
    """

    def __init__(
        self, layer: DecoderLayer, dtype: torch.dtype, read: Sequence[Tensor] | None = None
    ) -> None:
        """Of a layer.

        Args:
            read: in place of q's, k's and v's weights, such as some of their columns.
        """
        self._layer, self._dtype, self._read = layer, dtype, read or projections(layer)
        self.query_norm = of_norm(layer.self_attn.q_norm, dtype)
        self.key_norm = of_norm(layer.self_attn.k_norm, dtype)
        self.output_norm = of_norm(layer.post_attention_layernorm, dtype)

    @cached_property
    def query(self) -> Shared:
        """As its product reads it; so the others."""
        return Shared(self._read[0].to(self._dtype))

    @cached_property
    def key_value(self) -> Shared:
        return Shared(stacked(self._read[1:], self._dtype))

    @cached_property
    def output(self) -> Shared:
        return Shared(self._layer.self_attn.o_proj.weight.to(self._dtype))

    @cached_property
    def gate_up(self) -> Shared:
        mlp = self._layer.mlp
        return Shared(stacked([mlp.gate_proj.weight, mlp.up_proj.weight], self._dtype))

    @cached_property
    def down(self) -> Shared:
        return Shared(self._layer.mlp.down_proj.weight.to(self._dtype))

    def run_output(self, pieces: Pieces, attended: Tensor, residual: Tensor, eps: float) -> Tensor:
        """`DecoderLayer.output` [n, H] of attended values [n, Q] and residual [n, H]."""
        attended = self.output.product(attended)
        hidden, read = pieces.joined((residual, attended), self.output_norm, eps)
        return hidden + self.down.gated_product(self.gate_up.product(read))


def padded(x: Tensor, rows: StepRows) -> Tensor:
    """x [n, …] at the places [B, R, …] of its rows; shapes say whether there are others."""
    size = rows.index.numel()
    if len(x) < size:
        x = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.valid_rows, x)
    return x.unflatten(0, rows.index.shape)


def real(x: Tensor, rows: StepRows) -> Tensor:
    """Rows [n, C] of x [B, R, C]."""
    flat = x.flatten(0, 1)
    return branch(flat, rows.valid_rows)[1] if len(rows.valid_rows) < len(flat) else flat
