"""The operations of the fast forward passes that are neither products nor attention nor the gate.

torch.compile fuses them to a few kernels. Those that `train/fast/functions.py` calls have a
backward operation beside them, since a compiled function with autograd takes the host three times
as long as one without. The backward operations round where autograd does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.layers import at_least_float32, rotate

Rows = tuple[Tensor | None, ...]
"""Tensors whose first dimension is the number of rows."""
Weights = tuple[Tensor | None, ...]


def normed(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """Return the RMS norm of rows (x,) over the last dimension, with weights (w,)."""
    return F.rms_norm(rows[0], rows[0].shape[-1:], weights[0], eps)


def queries(rows: Rows, weights: Weights, eps: float) -> Tensor:
    """Return rotated queries [n, heads, head_dim].

    Args:
        rows: one or two products [n, Q], which are added; then cosines and sines (`Rope`).
        weights: norm of queries or None.
    """
    *products, cosines, sines = rows
    query = sum(products[1:], products[0]).unflatten(-1, (-1, 2 * cosines.shape[-1]))
    return rotate(query if weights[0] is None else normed((query,), weights, eps), (cosines, sines))


def keys_values(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """Return rotated keys, and values, each [n, kv heads, head_dim]; arguments as in `queries`."""
    *products, cosines, sines = rows
    key_value = sum(products[1:], products[0]).unflatten(-1, (-1, 2 * cosines.shape[-1]))
    key, value = key_value.chunk(2, 1)
    key = key if weights[0] is None else normed((key,), weights, eps)
    return rotate(key, (cosines, sines)), value


def add_norm(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum of rows (x, y), and its RMS norm with weights (w,), each [n, H]."""
    hidden = rows[0] + rows[1]
    return hidden, normed((hidden,), weights, eps)


def normed_backward(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x and of the weights in `normed`.

    Args:
        rows: the gradient of the norm; x; and, if there is one, another gradient of x, to be added.
    """
    gradient, x, *others = rows
    gradient, wide = at_least_float32(gradient), at_least_float32(x)
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    d_weight, weight = None, weights[0]
    if weight is not None:
        d_weight = (gradient * (wide * scale)).sum(tuple(range(x.ndim - 1))).to(weight.dtype)
        gradient = gradient * weight
    d_scale = (gradient * wide).sum(-1, keepdim=True)
    d_mean = -0.5 * d_scale * scale.pow(3) / x.shape[-1]
    d_x = sum(map(at_least_float32, others), gradient * scale) + d_mean * (2 * wide)
    return d_x.to(x.dtype), d_weight


def rotated(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Return rotated queries, rotated keys, and values, each [n, heads, head_dim].

    Args:
        rows: products of queries [n, Q] and of keys and values [n, K], of which one may be None, as
            are then its results; what is added to them, side by side [n, Q + K]; cosines and sines.
        weights: norms of queries and of keys, or None.
    """
    query, key_value, addend, *angles = rows
    width, key = 0 if query is None else query.shape[1], None
    value = None
    if query is not None:
        query = queries((query, addend[:, :width], *angles), weights[:1], eps)
    if key_value is not None:
        key, value = keys_values((key_value, addend[:, width:], *angles), weights[1:], eps)
        value = value.contiguous()  # here, where it is fused, and not in every later step
    return query, key, value


def rotated_backward(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Return the gradients of the products in `rotated` [n, Q + K], and of the norms' weights.

    Args:
        rows: those of `rotated`, where products without norm and their addend are not read; then
            the gradients of queries, keys and values, None where there are none.
    """
    query, key_value, addend, cosines, sines, d_query, d_key, d_value = rows
    back, width = (cosines, -sines), 0 if d_query is None else d_query[0].numel()
    parts, d_weights = [], [None, None]
    for number, (gradient, product) in enumerate(((d_query, query), (d_key, key_value))):
        if gradient is None:
            continue
        gradient = rotate(gradient, back)
        if weights[number] is not None:
            columns = slice(width) if number == 0 else slice(width, None)
            x = (product + addend[:, columns]).unflatten(-1, (-1, gradient.shape[-1]))
            x = x[:, : gradient.shape[1]]  # values have no norm
            gradient, d_weights[number] = normed_backward((gradient, x), weights[number:], eps)
        parts.append(gradient.flatten(1))
    if d_value is not None:
        parts.append(d_value.flatten(1))
    return torch.cat(parts, 1), *d_weights


class FusedOps(NamedTuple):
    """The functions above, eager or compiled; each takes rows, weights and an epsilon."""

    normed: Callable[..., Any] = normed
    queries: Callable[..., Any] = queries
    keys_values: Callable[..., Any] = keys_values
    add_norm: Callable[..., Any] = add_norm
    rotated: Callable[..., Any] = rotated
    normed_backward: Callable[..., Any] = normed_backward
    rotated_backward: Callable[..., Any] = rotated_backward


FUSED_OPS = FusedOps()
