"""The parts of a layer before and behind its attention, each one autograd function.

An unroll runs a layer many times on few rows. Autograd's bookkeeping of single operations would
then take longer than the operations. Gradients of weights add up in place (`Shared`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.train.fast.fused_ops import FusedOps, Weights
from draftlab.train.fast.shared_gradients import Shared, branch_gradient


class Projections(NamedTuple):
    """Weights and operations that make queries, keys and values of hidden states.

    Attributes:
        ops: the operations. eps: of norms.
        norm: weights of the norm of hidden states.
        query, key_value: weights of the products; None: they are not computed.
        embedded: [T, Q + K], the products of the tokens' embeddings with the other weights.
        norms: weights of the norms of queries and of keys.
        norm_before_residual: whether the residual is normed.
    """

    ops: FusedOps
    eps: float
    norm: Weights
    query: Shared | None
    key_value: Shared | None
    embedded: Shared
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
    embedded, *shared = projections.embedded, projections.query, projections.key_value
    weights = (None if each is None else each.tensor for each in shared)
    results = _LayerInputs.apply(
        projections, previous, origin, embedded.tensor, index, *angles,
        *projections.norm, *weights, *projections.norms,
    )  # fmt: skip
    return LayerInputs(*results)


class _LayerInputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projections: Projections, *tensors) -> tuple[Tensor | None, ...]:
        rows, weights = tensors[:6], tensors[6:]
        hidden, normed, query, key, value, *products = projections.ops.layer_inputs(
            rows, weights, projections.eps
        )
        previous, origin, embedded, index, *angles = rows
        ctx.save_for_backward(
            previous if origin is None else hidden, *angles, *products,
            normed, origin, index, *weights,
        )  # fmt: skip
        ctx.ops, ctx.eps = projections.ops, projections.eps
        ctx.norm_before_residual = projections.norm_before_residual
        ctx.embedded, ctx.num_previous = (embedded.shape, embedded.dtype), len(previous)
        # Not the matrices: nodes of a graph live on behind its backward pass.
        shared = projections.query, projections.key_value, projections.embedded
        ctx.sums = tuple(None if each is None else each.sum for each in shared)
        residual = normed if projections.norm_before_residual and origin is not None else hidden
        return previous.view_as(previous), residual, query, key, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_previous, d_residual, *d_rotated) -> tuple[Tensor | None, ...]:
        saved, (query, key_value, embedded) = ctx.saved_tensors, ctx.sums
        rows, (normed, origin, index), weights = saved[:6], saved[6:9], saved[9:]
        d_hidden, d_normed = d_previous if origin is None else d_residual, None
        if origin is not None and ctx.norm_before_residual:
            d_hidden, d_normed = None, d_residual
        d_products, d_hidden, *d_norms = ctx.ops.layer_inputs_backward(
            (*rows, *d_rotated, d_hidden, d_normed), weights, ctx.eps
        )
        width = 0 if query is None else len(weights[1])
        if query is not None:
            query.add_product(d_products[:, :width], normed)
        if key_value is not None:
            key_value.add_product(d_products[:, width:], normed)
        shape, dtype = ctx.embedded
        start = 0 if query is not None else shape[1] - d_products.shape[1]
        columns = slice(start, start + d_products.shape[1])
        embedded.add_rows(index, columns, d_products, shape, dtype)
        if origin is not None:
            d_hidden = branch_gradient(d_previous, origin, d_hidden, ctx.num_previous)
        return None, d_hidden, *[None] * 5, d_norms[0], None, None, *d_norms[1:]


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
    return _LayerOutput.apply(ops, sums, eps, attended, residual, *tensors, *norm)


class _LayerOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: FusedOps, sums, eps: float, attended, residual, *weights) -> Tensor:
        ctx.ops, ctx.sums, ctx.eps = ops, sums, eps
        output, *read_again = ops.layer_output((attended, residual), weights, eps)
        ctx.save_for_backward(attended, *read_again, *weights)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        attended, hidden, normed, gate_up, *weights = ctx.saved_tensors
        d_attended, d_hidden, d_gate_up, d_norm, activated = ctx.ops.layer_output_backward(
            (gradient, hidden, gate_up), tuple(weights), ctx.eps
        )
        output, both, down = ctx.sums
        down.add_product(gradient, activated)
        both.add_product(d_gate_up, normed)
        output.add_product(d_hidden, attended)
        return *[None] * 3, d_attended, d_hidden, *[None] * 3, d_norm
