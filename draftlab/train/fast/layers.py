"""Layers of the fast forward passes: a layer's weights, and the padding around attention.

Weights are cast once a batch. Gate and up are one product, and so are key and value. All uses of a
weight add to one gradient (`train/fast/shared_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftlab.heads.head import DecoderLayer
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.fast.functions import layer_output
from draftlab.train.fast.fused_ops import FusedOps, Weights
from draftlab.train.fast.shared_gradients import Shared, branch


def norm_weights(norm: Any, dtype: torch.dtype) -> Weights:
    """Return the weights of a norm (None: no norm) as `FusedOps` takes them."""
    return (None if norm is None else norm.weight.to(dtype),)


def stack_weights(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return weights [out, in] concatenated along their outputs, in the dtype of products."""
    return torch.cat([weight.to(dtype) for weight in weights])


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
        qkv: in place of q's, k's and v's weights, such as some of their columns.

    Attributes:
        query_norm, key_norm, output_norm: weights as `FusedOps` takes them.
        query, key_value, output, gate_up, down: weights of the products.
    """

    def __init__(
        self, layer: DecoderLayer, dtype: torch.dtype, qkv: Sequence[Tensor] | None = None
    ) -> None:
        self._layer, self._dtype, self._qkv = layer, dtype, qkv or qkv_weights(layer)
        self.query_norm = norm_weights(layer.self_attn.q_norm, dtype)
        self.key_norm = norm_weights(layer.self_attn.k_norm, dtype)
        self.output_norm = norm_weights(layer.post_attention_layernorm, dtype)

    @cached_property
    def query(self) -> Shared:
        return Shared(self._qkv[0].to(self._dtype))

    @cached_property
    def key_value(self) -> Shared:
        return Shared(stack_weights(self._qkv[1:], self._dtype))

    @cached_property
    def output(self) -> Shared:
        return Shared(self._layer.self_attn.o_proj.weight.to(self._dtype))

    @cached_property
    def gate_up(self) -> Shared:
        mlp = self._layer.mlp
        return Shared(stack_weights([mlp.gate_proj.weight, mlp.up_proj.weight], self._dtype))

    @cached_property
    def down(self) -> Shared:
        return Shared(self._layer.mlp.down_proj.weight.to(self._dtype))

    def run_output(self, ops: FusedOps, attended: Tensor, residual: Tensor, eps: float) -> Tensor:
        """Return `DecoderLayer.output` [n, H] of attended values [n, Q] and residual [n, H]."""
        weights = self.output, self.gate_up, self.down
        return layer_output(ops, attended, residual, weights, self.output_norm, eps)


def pad_rows(x: Tensor, rows: StepRows) -> Tensor:
    """Return x [n, …], of the valid rows alone, as [B, R, …] with zeros in padding rows."""
    size = rows.index.numel()
    if len(x) < size:
        x = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.valid_rows, x)
    return x.unflatten(0, rows.index.shape)


def unpad_rows(x: Tensor, rows: StepRows) -> Tensor:
    """Return the valid rows [n, C] of x [B, R, C]."""
    flat = x.flatten(0, 1)
    return branch(flat, rows.valid_rows)[1] if len(rows.valid_rows) < len(flat) else flat
