"""Gradients of what many operations of a graph share, added up in place.

Autograd makes a gradient of the whole tensor for each of its uses and adds them pair by pair: for
the weights of an unrolled layer that is a read and a write of all of them for each step, beside the
products; for picked rows three passes over all the rows there are. The uses of a `Shared` tensor
add to one sum: a product adds to what is there while it is made, rows are added where they belong.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.kernels.add_rows import add_rows_
from draftlab.kernels.swiglu import swiglu, swiglu_backward_

_ALL = slice(None)


class _Sum:
    """Of gradients, while a backward pass runs.

    The graph holds this and not what holds the tensor: with a cycle through the graph each step's
    weights would stay until Python collects garbage.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._pass = -1

    def so_far(self) -> Tensor | None:
        """Of this backward pass: one that stopped, or asked for other gradients, left its own."""
        current = torch._C._current_graph_task_id()  # as torch.utils.checkpoint tells passes apart
        if current != self._pass:
            self.value, self._pass = None, current
        return self.value

    def add(self, given: Tensor, x: Tensor) -> None:
        """Adds the gradient of W in x Wᵀ, of given [n, out] that came for it and x [n, in]."""
        if self.so_far() is None:
            self.value = given.T @ x
        else:
            self.value.addmm_(given.T, x)


class Shared:
    """A matrix that operations of one graph read through its products and `rows`.

    Its gradient exists when the last of them that the backward pass reaches has added its part.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.sum = _Sum()
        self.tensor = _Collected.apply(tensor, self.sum)

    def product(self, x: Tensor) -> Tensor:
        """x Wᵀ [n, out] of x [n, in] by this W [out, in], in their common dtype."""
        return _Product.apply(x, self.tensor, self.sum)

    def gated_product(self, gate_up: Tensor) -> Tensor:
        """`product` of silu(gate) · up, which is not kept, of gate_up [n, 2 in] side by side."""
        return _GatedProduct.apply(gate_up, self.tensor, self.sum)

    def rows(self, index: Tensor, columns: slice = _ALL) -> Tensor:
        """Rows [n, …], each at most once, of int64 index [n], and of them some columns."""
        return _Rows.apply(self.tensor, self.sum, index, columns)


class _Collected(torch.autograd.Function):
    """The tensor itself; its gradient is the sum that its uses made, which give autograd none."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor | None) -> tuple[Tensor | None, None]:
        found, ctx.total.value = ctx.total.so_far(), None
        if given is not None:  # somebody used the tensor in another way
            found = given if found is None else found + given
        return found, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, total: _Sum) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.total = total
        return x @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.total.add(gradient, x)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor, total: _Sum) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        ctx.total = total
        return swiglu(gate_up) @ weight.T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        gate_up, weight = ctx.saved_tensors
        inner = gradient @ weight
        given = swiglu_backward_(gate_up, inner)  # and inner is what was multiplied
        if ctx.needs_input_grad[1]:
            ctx.total.add(gradient, inner)
        return given, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, total: _Sum, index: Tensor, columns: slice) -> Tensor:
        ctx.save_for_backward(index)
        ctx.total, ctx.columns, ctx.like = total, columns, (tensor.shape, tensor.dtype)
        return tensor[:, columns].index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        (index,), total, (shape, dtype) = ctx.saved_tensors, ctx.total, ctx.like
        if total.so_far() is None:
            total.value = gradient.new_zeros(shape, dtype=dtype)
        add_rows_(total.value[:, ctx.columns], index, gradient)
        return None, None, None, None


def branch(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """x, and rows of it, each at most once: gradients of both are added in one pass.

    Args:
        x: [N, C]. index: int64 [n].

    Returns:
        x and x[index] [n, C].
    """
    return _Branch.apply(x, index)


class _Branch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        ctx.like = x.shape
        ctx.set_materialize_grads(False)
        return x.view_as(x), x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, whole: Tensor | None, rows: Tensor | None) -> tuple[Tensor | None, None]:
        if rows is None:
            return whole, None
        # A copy, since others may hold the gradient that came.
        if whole is None:
            given = rows.new_zeros(ctx.like)
        else:
            given = whole.clone(memory_format=torch.contiguous_format)
        add_rows_(given, *ctx.saved_tensors, rows)
        return given, None
