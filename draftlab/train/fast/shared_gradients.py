"""Gradients of tensors that many operations of a graph use, accumulated in place.

For each use of a tensor autograd computes a gradient of the whole tensor, and adds these pair by
pair. For the weights of an unrolled layer this costs a read and a write of all weights for each
step, beside the products; for selected rows it costs three passes over all rows. The uses of a
`Shared` tensor accumulate into one sum instead: products by addmm, rows by an indexed add.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from draftlab.kernels.add_rows import add_rows_
from draftlab.kernels.fp8_linear import Fp8Weight


class _Sum:
    """The sum of a tensor's gradients during a backward pass.

    The graph refers to this object and not to `Shared`, which holds the tensor: a reference cycle
    through the graph would keep each step's weights until Python collects garbage.
    """

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self._pass = -1

    def current(self) -> Tensor | None:
        """Return the sum of this backward pass.

        It drops the sum of an earlier pass that failed, or that needed other gradients only.
        """
        current = torch._C._current_graph_task_id()  # torch.utils.checkpoint does the same
        if current != self._pass:
            self.value, self._pass = None, current
        return self.value

    def add_product(self, gradient: Tensor, x: Tensor) -> None:
        """Add the gradient of W in x Wᵀ, from the product's gradient [n, out] and x [n, in]."""
        if self.current() is None:
            self.value = gradient.T @ x
        else:
            self.value.addmm_(gradient.T, x)

    def add_rows(
        self, index: Tensor, columns: slice, gradient: Tensor, shape: torch.Size, dtype: torch.dtype
    ) -> None:
        """Add the gradient [n, …] of some columns of rows `index` of a tensor."""
        if self.current() is None:
            self.value = gradient.new_zeros(shape, dtype=dtype)
        add_rows_(self.value[:, columns], index, gradient)


class Shared:
    """A matrix that operations of one graph use through `product` and `fast/layers.py`.

    Args:
        tensors: [out_i, in], which become one matrix [Σ out_i, in] in `dtype` (None: theirs).

    Attributes:
        tensor: the matrix in `dtype`, which has a gradient and which `product` multiplies.
        matrix: what `fast/layers.py` multiplies rows by, `tensor` or its quantised form.
    """

    def __init__(
        self,
        *tensors: Tensor,
        dtype: torch.dtype | None = None,
        quantise: Callable[[Tensor], Fp8Weight] | None = None,
    ) -> None:
        self.sum = _Sum()
        self.tensor = _Collected.apply(self.sum, dtype or tensors[0].dtype, *tensors)
        self.matrix = self.tensor if quantise is None else quantise(self.tensor)

    def product(self, x: Tensor) -> Tensor:
        """Return x Wᵀ [n, out] for x [n, in] and this W [out, in], in their common dtype."""
        return _Product.apply(x, self.tensor, self.sum)


class _Collected(torch.autograd.Function):
    """Tensors as one; its gradient is the sum of the uses, which pass no gradient to autograd."""

    @staticmethod
    def forward(ctx: Any, total: _Sum, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        ctx.total, ctx.dtype, ctx.sizes = total, tensors[0].dtype, [*map(len, tensors)]
        ctx.set_materialize_grads(False)
        if len(tensors) == 1:
            return tensors[0].to(dtype).view_as(tensors[0])
        whole = tensors[0].new_empty(sum(ctx.sizes), tensors[0].shape[1], dtype=dtype)
        torch._foreach_copy_(whole.split(ctx.sizes), tensors)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        total, ctx.total.value = ctx.total.current(), None
        if gradient is not None:  # the tensor was also used directly
            total = gradient if total is None else total + gradient
        if total is None:
            return None, None, *[None] * len(ctx.sizes)
        return None, None, *total.to(ctx.dtype).split(ctx.sizes)


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
            ctx.total.add_product(gradient, x)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index] [n, C] of x [N, C]; no row occurs twice, for which autograd's own backward
    pass provides, and takes longer.
    """
    return _SelectedRows.apply(x, index)


class _SelectedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return branch_gradient(None, *ctx.saved_tensors, gradient, ctx.num_rows), None


def branch_gradient(whole: Tensor | None, index: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Return the gradient of x [num_rows, C] from those of x (None: zero) and of x[index]."""
    if whole is None:
        gradient = rows.new_zeros(num_rows, *rows.shape[1:])
    else:  # a copy: other nodes of the graph may hold this gradient
        gradient = whole.clone(memory_format=torch.contiguous_format)
    add_rows_(gradient, index, rows)
    return gradient
