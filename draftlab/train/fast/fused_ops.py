"""The operations of the fast forward passes, eager or compiled.

torch.compile makes a few kernels of those that are neither products nor attention. A layer's parts
before and behind its attention have their backward passes beside them, since a compiled function
with autograd takes the host three times as long as one without. They add and round where autograd
does. `train/fast/functions.py` makes autograd functions of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.layers import at_least_float32, rotate
from draftlab.kernels.swiglu import swiglu, swiglu_backward_

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


def layer_inputs(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Run `functions.layer_inputs` without autograd.

    Args:
        rows: previous, origin or None, embedded, index; cosines and sines.
        weights: of the norm; of queries, and of keys and values, of which one may be None; of the
            norms of queries and of keys, or None.

    Returns:
        hidden (None: `previous`) and normed hidden states; queries, keys, values; and for norms of
        queries and keys the products that these read and what is added to both, side by side.
    """
    previous, origin, embedded, index, *angles = rows
    norm, query_weight, key_value_weight, *norms = weights
    hidden = previous if origin is None else previous.index_select(0, origin)
    normed_hidden = normed((hidden,), (norm,), eps)
    query, key_value = (
        None if weight is None else normed_hidden @ weight.T
        for weight in (query_weight, key_value_weight)
    )
    width = 0 if query is None else query.shape[1]
    end = width if key_value is None else embedded.shape[1]
    start = 0 if key_value is None else end - width - key_value.shape[1]
    addend = embedded[:, start:end].index_select(0, index)
    products = (None, None, None) if norms == [None, None] else (query, key_value, addend)
    key = value = None
    if query is not None:
        query = queries((query, addend[:, :width], *angles), norms[:1], eps)
    if key_value is not None:
        key, value = keys_values((key_value, addend[:, width:], *angles), norms[1:], eps)
        value = value.contiguous()  # once, and not in every later step
    gathered = None if origin is None else hidden
    return gathered, normed_hidden, query, key, value, *products


def layer_inputs_backward(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Return the gradients of the products, side by side [n, Q + K], and of hidden states.

    The gradients of norms' weights follow: of hidden states, queries and keys.

    Args:
        rows: hidden states; cosines and sines; the products that norms read, and what is added to
            them; the gradients of queries, keys and values; other gradients of hidden states and
            of normed ones. Absent ones are None.
        weights: those of `layer_inputs`.
    """
    hidden, cosines, sines, *products, addend, d_query, d_key, d_value, d_hidden, d_normed = rows
    norm, query_weight, key_value_weight, *norms = weights
    back, width = (cosines, -sines), 0 if query_weight is None else len(query_weight)
    parts, d_norms = [], [None, None]
    for number, (gradient, product) in enumerate(zip((d_query, d_key), products, strict=True)):
        if gradient is None:
            continue
        gradient = rotate(gradient, back)
        if norms[number] is not None:
            columns = slice(width) if number == 0 else slice(width, None)
            x = (product + addend[:, columns]).unflatten(-1, (-1, gradient.shape[-1]))
            x = x[:, : gradient.shape[1]]  # values have no norm
            gradient, d_norms[number] = normed_backward((gradient, x), norms[number:], eps)
        parts.append(gradient.flatten(1))
    if d_value is not None:
        parts.append(d_value.flatten(1))
    d_products = torch.cat(parts, 1)
    if key_value_weight is not None:
        product = d_products[:, width:] @ key_value_weight
        d_normed = product if d_normed is None else d_normed + product
    if query_weight is not None:
        product = d_products[:, :width] @ query_weight
        d_normed = product if d_normed is None else d_normed + product
    others = () if d_hidden is None else (d_hidden,)
    return d_products, *normed_backward((d_normed, hidden, *others), (norm,), eps), *d_norms


def layer_output(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, ...]:
    """Return the output of a layer [n, H], and what the backward pass reads.

    Args:
        rows: attended values and residual.
        weights: of the output projection, of gate and up as one, of down, and of the norm.
    """
    attended, residual = rows
    output_weight, gate_up_weight, down_weight, norm = weights
    hidden = residual + attended @ output_weight.T
    normed_hidden = normed((hidden,), (norm,), eps)
    gate_up = normed_hidden @ gate_up_weight.T
    # torch.compile fuses the reference itself.
    gate = swiglu.reference if torch.compiler.is_compiling() else swiglu
    return hidden + gate(gate_up) @ down_weight.T, hidden, normed_hidden, gate_up


def layer_output_backward(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Return the gradients of `attended`, of the residual, of gate and up, and of the norm.

    The last result is the input of the down projection.

    Args:
        rows: the gradient of the output; hidden, and gate and up, as `layer_output` returned them.
        weights: those of `layer_output`.
    """
    gradient, hidden, gate_up = rows
    output_weight, gate_up_weight, down_weight, norm = weights
    inner = gradient @ down_weight
    compiling = torch.compiler.is_compiling()
    gate_backward_ = swiglu_backward_.reference if compiling else swiglu_backward_
    d_gate_up = gate_backward_(gate_up, inner)  # inner becomes silu(gate) · up
    states = (d_gate_up @ gate_up_weight, hidden, gradient)
    d_hidden, d_norm = normed_backward(states, (norm,), eps)
    return d_hidden @ output_weight, d_hidden, d_gate_up, d_norm, inner


class FusedOps(NamedTuple):
    """The functions above, eager or compiled; each takes rows, weights and an epsilon."""

    normed: Callable[..., Any] = normed
    queries: Callable[..., Any] = queries
    keys_values: Callable[..., Any] = keys_values
    layer_inputs: Callable[..., Any] = layer_inputs
    layer_inputs_backward: Callable[..., Any] = layer_inputs_backward
    layer_output: Callable[..., Any] = layer_output
    layer_output_backward: Callable[..., Any] = layer_output_backward


FUSED_OPS = FusedOps()
