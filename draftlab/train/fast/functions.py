"""The parts of a layer before and behind its attention, each one autograd function.

An unroll runs a layer many times on few rows. Autograd's own bookkeeping then takes longer than the
operations, so the backward passes are written out here, with autograd's order of sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.kernels.swiglu import swiglu, swiglu_backward_
from draftlab.train.fast.fused_ops import FusedOps, Weights
from draftlab.train.fast.shared_gradients import Shared, branch_gradient


class Projections(NamedTuple):
    """What turns hidden states into queries, keys and values.

    Attributes:
        ops: the operations, and eps, the epsilon of norms.
        norm: weights of the norm of hidden states.
        query, key_value: weights of the products; None: they are not computed.
        embedded: [T, C], the products of the tokens' embeddings with the other weights.
        columns: those of `embedded` that belong to `query` and `key_value`, in this order.
        norms: weights of the norms of queries and of keys.
        norm_before_residual: whether the residual is normed.
    """

    ops: FusedOps
    eps: float
    norm: Weights
    query: Shared | None
    key_value: Shared | None
    embedded: Shared
    columns: slice
    norms: Weights
    norm_before_residual: bool


class LayerInputs(NamedTuple):
    """Results of `layer_inputs` for n rows.

    Attributes:
        previous: the argument, as a branch point of the graph.
        residual: [n, H]; None for all rows of `previous`.
        query, key, value: [n, heads, head_dim], rotated; None where `Projections` has no weights.
    """

    previous: Tensor
    residual: Tensor | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None


def layer_inputs(
    projections: Projections,
    previous: Tensor,
    origin: Tensor | None,
    index: Tensor,
    angles: tuple[Tensor, ...],
) -> LayerInputs:
    """Return residuals, queries, keys and values of some rows of hidden states.

    Args:
        previous: [N, H], hidden states.
        origin: int64 [n], rows of `previous`, none twice; None: all.
        index: int64 [n], rows of `embedded` that are added, none twice.
        angles: of the rows (`Rope`).
    """
    weights = (projections.query, projections.key_value, projections.embedded)
    tensors = (None if shared is None else shared.tensor for shared in weights)
    results = _LayerInputs.apply(
        previous, *projections.norm, *tensors, *projections.norms,
        projections, origin, index, *angles,
    )  # fmt: skip
    return LayerInputs(*results)


class _LayerInputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, previous, norm, query_weight, key_value_weight, embedded, query_norm, key_norm,
        projections, origin, index, cosines, sines,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        ops, eps = projections.ops, projections.eps
        hidden = previous if origin is None else previous.index_select(0, origin)
        normed = ops.normed((hidden,), (norm,), eps)
        query, key_value = (
            None if weight is None else normed @ weight.T
            for weight in (query_weight, key_value_weight)
        )
        addend = embedded[:, projections.columns].index_select(0, index)
        norms = query_norm, key_norm
        rotated = ops.rotated((query, key_value, addend, cosines, sines), norms, eps)
        products = query, key_value, addend
        if query_norm is None and key_norm is None:  # only norms read them again
            products = None, None, None
        ctx.save_for_backward(
            hidden, normed, norm, query_weight, key_value_weight, *norms, origin, index,
            *products, cosines, sines,
        )  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.projections, ctx.embedded = projections, (embedded.shape, embedded.dtype)
        ctx.num_previous = len(previous)
        residual = normed if projections.norm_before_residual else hidden
        return previous.view_as(previous), None if origin is None else residual, *rotated

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_previous, d_residual, *d_rotated) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        hidden, normed, norm, *weights, query_norm, key_norm, origin, index = saved[:9]
        projections, (shape, dtype) = ctx.projections, ctx.embedded
        ops, eps = projections.ops, projections.eps
        d_products, *d_norms = ops.rotated_backward(
            (*saved[9:], *d_rotated), (query_norm, key_norm), eps
        )
        projections.embedded.sum.add_rows(index, projections.columns, d_products, shape, dtype)
        d_normed, d_hidden = d_residual, None
        if not projections.norm_before_residual:
            d_normed, d_hidden = None, d_residual
        if origin is None:
            d_hidden = d_previous
        sizes = [0 if weight is None else len(weight) for weight in weights]
        shares = (projections.query, projections.key_value)
        parts = zip(d_products.split(sizes, 1), weights, shares, strict=True)
        for gradient, weight, shared in reversed([*parts]):
            if weight is not None:
                shared.sum.add_product(gradient, normed)
                product = gradient @ weight
                d_normed = product if d_normed is None else d_normed + product
        rows = (d_normed, hidden) if d_hidden is None else (d_normed, hidden, d_hidden)
        d_hidden, d_norm = ops.normed_backward(rows, (norm,), eps)
        if origin is not None:
            d_hidden = branch_gradient(d_previous, origin, d_hidden, ctx.num_previous)
        return d_hidden, d_norm, None, None, None, *d_norms, *[None] * 5


def layer_output(
    ops: FusedOps,
    attended: Tensor,
    residual: Tensor,
    weights: tuple[Shared, Shared, Shared],
    norm: Weights,
    eps: float,
) -> Tensor:
    """Return `DecoderLayer.output` [n, H] of attended values [n, Q] and residual [n, H].

    Args:
        weights: of the projection of attended values, of gate and up as one, and of down.
        norm: weights of the norm before the feed-forward.
    """
    tensors, sums = zip(*((shared.tensor, shared.sum) for shared in weights), strict=True)
    return _LayerOutput.apply(attended, residual, *tensors, *norm, sums, ops, eps)


class _LayerOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, attended, residual, output, gate_up, down, norm, *rest) -> Tensor:
        ctx.sums, ctx.ops, ctx.eps = rest
        projected = attended @ output.T
        hidden, normed = ctx.ops.add_norm((residual, projected), (norm,), ctx.eps)
        inner = normed @ gate_up.T
        ctx.save_for_backward(attended, hidden, normed, inner, output, gate_up, down, norm)
        return hidden + swiglu(inner) @ down.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        attended, hidden, normed, inner, output, gate_up, down, norm = ctx.saved_tensors
        output_sum, gate_up_sum, down_sum = ctx.sums
        activated = gradient @ down
        d_inner = swiglu_backward_(inner, activated)  # activated becomes silu(gate) · up
        down_sum.add_product(gradient, activated)
        gate_up_sum.add_product(d_inner, normed)
        rows = (d_inner @ gate_up, hidden, gradient)
        d_hidden, d_norm = ctx.ops.normed_backward(rows, (norm,), ctx.eps)
        output_sum.add_product(d_hidden, attended)
        return d_hidden @ output, d_hidden, None, None, None, d_norm, None, None, None
