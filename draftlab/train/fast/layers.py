"""Layers of the fast forward passes, and the padding around their attention.

The parts of a layer before and behind its attention are one autograd function each: a small head's
operations take a GPU less time than autograd's bookkeeping of each takes the host, and an unroll
runs a layer many times. Weights of products are cast once a batch; gate and up are one product, and
so are key and value. All uses of a weight add to one gradient (`train/fast/shared_gradients.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.heads.head import DecoderLayer, DraftHead
from draftlab.heads.layers import Angles
from draftlab.kernels.fp8_linear import flatten_weights, unflatten_weights
from draftlab.kernels.swiglu import swiglu, swiglu_backward_
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.fast.fused_ops import FP8_OPS, FUSED_OPS, FusedOps
from draftlab.train.fast.shared_gradients import Shared, branch_gradient
from draftlab.train.objectives.loss import StepOutput


class FastForward(ABC):
    """A faster forward pass with the outputs and gradients of an objective's `forward`.

    Args:
        dtype: of products, norms and saved activations.
        ops: `FUSED_OPS`, `FP8_OPS`, or the same compiled.
    """

    description: str

    def __init__(self, dtype: torch.dtype, *, ops: FusedOps = FUSED_OPS) -> None:
        self.dtype, self.ops = dtype, ops

    @staticmethod
    @abstractmethod
    def supports(head: DraftHead) -> bool:
        """Return whether this forward pass computes the head."""

    @classmethod
    def supports_fp8(cls, head: DraftHead) -> bool:
        """Return whether it computes the layers' products in 8 bits."""
        return cls.supports(head)

    @abstractmethod
    def outputs(self, head: Any, batch: Batch, steps: list[StepRows]) -> Iterable[Tensor]:
        """Return the output [n, H] of each step that has rows."""

    @property
    def in_fp8(self) -> bool:
        """Return whether products of layers are in 8 bits."""
        return self.ops.quantise_weight is not None

    def eager(self) -> FastForward:
        """Return the same forward pass without torch.compile."""
        return type(self)(self.dtype, ops=FP8_OPS if self.in_fp8 else FUSED_OPS)

    def __call__(self, head: Any, batch: Batch) -> list[StepOutput]:
        """Return each step's output; gradients flow through all earlier steps."""
        steps = [rows for rows in batch.steps if rows.index.shape[1]]
        if not steps:
            return []
        # All tensors have one dtype already. Autocast would widen norms and cast their readers.
        with torch.autocast(batch.tokens.device.type, enabled=False):
            outputs = self.outputs(head, batch, steps)
        return [StepOutput(o, rows.teacher_index) for o, rows in zip(outputs, steps, strict=True)]


class Projections(NamedTuple):
    """Weights and operations that make queries, keys and values of hidden states.

    Attributes:
        norm: weight of the norm of hidden states; None: they have none.
        query, key_value: weights of the products; None: they are not computed.
        query_norm, key_norm: weights of norms; None: there is none.
        embedded: [T, Q + K], the products of the tokens' embeddings with the other weights; None:
            the products read hidden states alone.
        norm_before_residual: whether the residual is normed.
    """

    ops: FusedOps
    eps: float
    norm: Tensor | None
    query: Shared | None
    key_value: Shared | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    embedded: Shared | None = None
    norm_before_residual: bool = False


class LayerInputs(NamedTuple):
    """Results of `layer_inputs`.

    Attributes:
        previous: the argument, as a branch point of the graph.
        residual: [n, H]; None for all rows of `previous`.
        query, key, value: [rows, heads, head_dim], the first two rotated; None where `Projections`
            has no weights.
        context_key, context_value: [C, kv heads, head_dim]; None without context.
    """

    previous: Tensor
    residual: Tensor | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    context_key: Tensor | None
    context_value: Tensor | None


def layer_inputs(
    projections: Projections,
    previous: Tensor,
    angles: Angles,
    *,
    origin: Tensor | None = None,
    index: Tensor | None = None,
    context: Tensor | None = None,
) -> LayerInputs:
    """Return residuals, queries, keys and values of n rows of hidden states.

    Args:
        previous: [N, H], hidden states.
        angles: of the rows (`Rope`), behind those of `context`. If there are not n of them, the
            last row of `previous` stands for all further rows, or for none.
        origin: int64 [n], rows of `previous`, none twice; None: all.
        index: int64 [n], rows of `embedded` that are added, none twice; None without `embedded`.
        context: [C, H], rows that have keys and values alone, and no norm.
    """
    shared = projections.embedded, projections.query, projections.key_value
    embedded, *weights = (None if each is None else each.tensor for each in shared)
    results = _LayerInputs.apply(
        projections, previous, context, origin, embedded, index, *angles,
        projections.norm, *weights, projections.query_norm, projections.key_norm,
    )  # fmt: skip
    return LayerInputs(*results)


class _LayerInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projections: Projections, *tensors) -> tuple[Tensor | None, ...]:
        rows, (norm, _, _, *head_norms) = tensors[:7], tensors[7:]
        shared = projections.query, projections.key_value
        matrices = (None if each is None else each.matrix for each in shared)
        weights = norm, *matrices, *head_norms
        residual, product_input, query, key, value, *products = projections.ops.layer_inputs(
            rows, weights, projections.eps
        )
        previous, context, origin, embedded, index, *angles = rows
        hidden = previous if residual is None else residual
        product_input = hidden if product_input is None else product_input
        weight_tensors, ctx.in_fp8 = flatten_weights(weights)
        ctx.save_for_backward(
            hidden, *angles, *products, product_input, origin, index, *weight_tensors
        )
        ctx.ops, ctx.eps = projections.ops, projections.eps
        ctx.norm_before_residual = projections.norm_before_residual
        ctx.num_previous, ctx.num_context = len(previous), 0 if context is None else len(context)
        context_key = context_value = None
        if context is not None:
            context_key, key = key[: len(context)], key[len(context) :]
            context_value, value = value[: len(context)], value[len(context) :]
        ctx.embedded = None if embedded is None else (embedded.shape, embedded.dtype)
        # Not the matrices: nodes of a graph live on behind its backward pass.
        shared = projections.query, projections.key_value, projections.embedded
        ctx.sums = tuple(None if each is None else each.sum for each in shared)
        ctx.set_materialize_grads(False)
        if residual is not None and projections.norm_before_residual:
            residual = product_input
        return previous.view_as(previous), residual, query, key, value, context_key, context_value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_previous, d_residual, *d_heads) -> tuple[Tensor | None, ...]:
        saved, (query, key_value, embedded) = ctx.saved_tensors, ctx.sums
        rows, (product_input, origin, index) = saved[:5], saved[5:8]
        weights = unflatten_weights(saved[8:], ctx.in_fp8)
        if all(gradient is None for gradient in (d_residual, *d_heads)):
            return None, d_previous, *[None] * 11
        d_hidden, d_normed = d_previous if origin is None else d_residual, None
        if origin is not None and ctx.norm_before_residual:
            d_hidden, d_normed = None, d_residual
        d_query, d_key_value, d_context, d_hidden, *d_norms = ctx.ops.layer_inputs_backward(
            (*rows, *d_heads, d_hidden, d_normed), weights, ctx.eps
        )
        if query is not None:
            query.add_product(d_query, product_input[ctx.num_context :])
        if key_value is not None:
            key_value.add_product(d_key_value, product_input)
        if embedded is not None:
            shape, dtype = ctx.embedded
            if query is not None:
                embedded.add_rows(index, slice(d_query.shape[1]), d_query, shape, dtype)
            if key_value is not None:
                columns = slice(shape[1] - d_key_value.shape[1], shape[1])
                embedded.add_rows(index, columns, d_key_value, shape, dtype)
        if origin is not None:
            d_hidden = branch_gradient(d_previous, origin, d_hidden, ctx.num_previous)
        d_norm, *d_norms = d_norms
        return None, d_hidden, d_context, *[None] * 5, d_norm, None, None, *d_norms


class _LayerOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: FusedOps, shared, eps: float, attended, residual, *tensors
    ) -> Tensor:
        ctx.ops, ctx.sums, ctx.eps = ops, tuple(each.sum for each in shared), eps
        weights = *(each.matrix for each in shared), tensors[-1]
        output, *read_again = ops.layer_output((attended, residual), weights, eps)
        weight_tensors, ctx.in_fp8 = flatten_weights(weights)
        ctx.save_for_backward(attended, *read_again, *weight_tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        attended, hidden, normed, gate_up, *saved = ctx.saved_tensors
        weights = unflatten_weights(saved, ctx.in_fp8)
        d_attended, d_hidden, d_gate_up, d_norm, activated = ctx.ops.layer_output_backward(
            (gradient, hidden, gate_up), weights, ctx.eps
        )
        output, both, down = ctx.sums
        down.add_product(gradient, activated)
        both.add_product(d_gate_up, normed)
        output.add_product(d_hidden, attended)
        return *[None] * 3, d_attended, d_hidden, *[None] * 3, d_norm


def qkv_weights(layer: DecoderLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of q, k and v."""
    attention = layer.self_attn
    return attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight


class LayerWeights:
    """Weights of a layer, cast to the dtype of products, with gradients to its parameters.

    Each weight is cast when it is first used. Autograd runs later operations first, so a weight's
    gradient is complete, and can be reduced over ranks, while the backward pass still runs what
    came before its first use. `qkv` stands in place of q's, k's and v's weights, such as some of
    their columns.
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
        tensors = *(w.tensor for w in weights), self._layer.post_attention_layernorm.weight
        return _LayerOutput.apply(self._ops, weights, eps, attended, residual, *tensors)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return `SwiGLU` [n, H] of x [n, H]."""
        return self.down.product(_Swiglu.apply(self.gate_up.product(x)))


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # A copy, which is overwritten: other nodes of the graph may hold this gradient.
        return swiglu_backward_(*ctx.saved_tensors, gradient.clone())


def pad_rows(x: Tensor, rows: StepRows) -> Tensor:
    """Return x [n, …], of the valid rows alone, as [B, R, …] with zeros in padding rows.

    `rows.index` may have further leading dimensions.
    """
    size = rows.index.numel()
    if len(x) < size:
        x = x.new_zeros(size, *x.shape[1:]).index_copy(0, rows.valid_rows, x)
    return x.view(*rows.index.shape, *x.shape[1:])


def unpad_rows(x: Tensor, rows: StepRows) -> Tensor:
    """Return the valid rows [n, …] of x [B, R, …], the inverse of `pad_rows`."""
    flat = x.flatten(0, rows.index.ndim - 1)
    return flat.index_select(0, rows.valid_rows) if len(rows.valid_rows) < len(flat) else flat
