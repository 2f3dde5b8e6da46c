"""Layers of the fast forward passes: a layer's weights, and the padding around attention.

Weights of products are cast once a batch. Gate and up are one product, and so are key and value.
All uses of a weight add to one gradient (`train/fast/shared_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from draftlab.heads.head import DecoderLayer
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.fast.functions import Projections, layer_output
from draftlab.train.fast.fused_ops import FusedOps
from draftlab.train.fast.shared_gradients import Shared


def qkv_weights(layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of q, k and v."""
    attention = layer.self_attn
    return attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight


class LayerWeights:
    """Weights of a layer, cast to the dtype of products, with gradients to its parameters.

    Each weight is cast when it is first used. Autograd runs later operations first, so a weight's
    gradient is complete, and can be reduced over ranks, while the backward pass still runs what
    came before its first use.

    Args:
        layer: the layer.
        dtype: of products.
        ops: `FUSED_OPS`, `FP8_OPS`, or the same compiled.
        qkv: in place of q's, k's and v's weights, such as some of their columns.

    Attributes:
        query, key_value, output, gate_up, down: weights of the products.
    """

    def __init__(
        self,
        layer: DecoderLayer,
        dtype: torch.dtype,
        ops: FusedOps,
        qkv: Sequence[Tensor] | None = None,
    ) -> None:
        self._layer, self._ops, self._qkv = layer, ops, qkv or qkv_weights(layer)
        self._options = {"dtype": dtype, "quantise": ops.quantise_weight}

    @cached_property
    def query(self) -> Shared:
        return Shared(self._qkv[0], **self._options)

    @cached_property
    def key_value(self) -> Shared:
        return Shared(*self._qkv[1:], **self._options)

    @cached_property
    def output(self) -> Shared:
        return Shared(self._layer.self_attn.o_proj.weight, **self._options)

    @cached_property
    def gate_up(self) -> Shared:
        mlp = self._layer.mlp
        return Shared(mlp.gate_proj.weight, mlp.up_proj.weight, **self._options)

    @cached_property
    def down(self) -> Shared:
        return Shared(self._layer.mlp.down_proj.weight, **self._options)

    def projections(self, eps: float, norm: Tensor | None) -> Projections:
        """Return what `layer_inputs` takes; `norm` is the weight of hidden states' norm."""
        norms = self._layer.self_attn.q_norm, self._layer.self_attn.k_norm
        norm_weights = (None if each is None else each.weight for each in norms)
        return Projections(self._ops, eps, norm, self.query, self.key_value, *norm_weights)

    def run_output(self, attended: Tensor, residual: Tensor, eps: float) -> Tensor:
        """Return `DecoderLayer.output` [n, H] of attended values [n, Q] and residual [n, H]."""
        weights = self.output, self.gate_up, self.down
        norm = self._layer.post_attention_layernorm.weight
        return layer_output(self._ops, attended, residual, weights, norm, eps)


def pad_rows(x: Tensor, rows: StepRows) -> Tensor:
    """Return x [n, …], of the valid rows alone, as [B, R, …] with zeros in padding rows.

    Args:
        rows: `index` may have further leading dimensions.
    """
    size = rows.index.numel()
    if len(x) < size:
        x = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.valid_rows, x)
    return x.view(*rows.index.shape, *x.shape[1:])


def unpad_rows(x: Tensor, rows: StepRows) -> Tensor:
    """Return the valid rows [n, …] of x [B, R, …], the inverse of `pad_rows`."""
    flat = x.flatten(0, rows.index.ndim - 1)
    return flat.index_select(0, rows.valid_rows) if len(rows.valid_rows) < len(flat) else flat
