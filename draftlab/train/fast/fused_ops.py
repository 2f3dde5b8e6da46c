"""The operations of the fast forward passes, eager or compiled.

torch.compile makes a few kernels of those that are neither products nor attention. A layer's parts
before and behind its attention have their backward passes beside them, since a compiled function
with autograd takes the host three times as long as one without. They sum in float32 what autograd
would round first: a norm's gradient with the residual's, and that of the norm's weight over rows.
`train/fast/layers.py` makes autograd functions of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.heads.layers import Angles, at_least_float32, convolve_slots, rotate
from draftlab.kernels.fp8_linear import Fp8Weight, input_gradient, linear, quantise_weight
from draftlab.kernels.swiglu import swiglu, swiglu_backward_

Rows = tuple[Tensor | None, ...]
"""Tensors whose first dimension is the number of rows."""
Weights = tuple[Tensor | Fp8Weight | None, ...]


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return the RMS norm of x over the last dimension."""
    weight = None if weight is None else weight.to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def normed_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    other_gradient: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x, with that of other uses, and of the weight in `normed`."""
    gradient, wide = at_least_float32(gradient), at_least_float32(x)
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    d_weight = None
    if weight is not None:
        d_weight = (gradient * (wide * scale)).sum(tuple(range(x.ndim - 1))).to(weight.dtype)
        gradient = gradient * weight.to(x.dtype)
    d_scale = (gradient * wide).sum(-1, keepdim=True)
    d_mean = -0.5 * d_scale * scale.pow(3) / x.shape[-1]
    d_x = gradient * scale
    if other_gradient is not None:
        d_x = at_least_float32(other_gradient) + d_x
    return (d_x + d_mean * (2 * wide)).to(x.dtype), d_weight


def expand_last(x: Tensor, num_rows: int) -> Tensor:
    """Return x [N, …] as [num_rows, …]: the last row stands for all from row N − 1 on, or none."""
    if len(x) == num_rows:
        return x
    last = x[-1:].expand(num_rows - len(x) + 1, *x.shape[1:])
    return torch.cat([x[:-1], last])


def expand_last_backward(gradient: Tensor, num_rows: int) -> Tensor:
    """Return the gradient of x [num_rows, …] in `expand_last`."""
    if len(gradient) == num_rows:
        return gradient
    last = gradient[num_rows - 1 :].sum(0, keepdim=True)
    return torch.cat([gradient[: num_rows - 1], last])


def split_heads(product: Tensor, angles: Angles) -> Tensor:
    """Return a product [N, C] by head, with a row for each of the angles: [n, heads, head_dim]."""
    cosines = angles[0]
    return expand_last(product, len(cosines)).unflatten(-1, (-1, 2 * cosines.shape[-1]))


def norm_and_rotate(heads: Tensor, norm: Tensor | None, angles: Angles, eps: float) -> Tensor:
    """Return rotated queries or keys; a norm, if there is one, precedes the rotation."""
    return rotate(heads if norm is None else normed(heads, norm, eps), angles)


def norm_and_rotate_backward(
    gradient: Tensor, product: Tensor | None, norm: Tensor | None, angles: Angles, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the heads, side by side [n, C], and of the norm; `product`: what
    `split_heads` read for the heads and, in columns behind them, values.
    """
    cosines, sines = angles
    gradient, d_norm = rotate(gradient, (cosines, -sines)), None
    if norm is not None:
        heads = split_heads(product, angles)[:, : gradient.shape[1]]
        gradient, d_norm = normed_backward(gradient, heads, norm, eps)
    return gradient.flatten(1), d_norm


def layer_inputs(rows: Rows, weights: Weights, eps: float) -> Rows:
    """Run `functions.layer_inputs` without autograd.

    Args:
        rows: previous; context, origin, embedded and index or None; cosines and sines.
        weights: of the norm, or None; of queries, and of keys and values, of which one may be None;
            of the norms of queries and of keys, or None.

    Returns:
        The rows of `previous` (None: all), what the products read (None: these rows), queries, and
        keys and values, first those of `context`. Then the products that norms of queries and of
        keys read, or None.
    """
    previous, context, origin, embedded, index, *angles = rows
    norm, query_weight, key_value_weight, query_norm, key_norm = weights
    hidden = previous if origin is None else previous.index_select(0, origin)
    product_input = hidden if norm is None else normed(hidden, norm, eps)
    query = key = value = query_product = key_value_product = None
    if query_weight is not None:
        query_product = linear(product_input, query_weight)
        if embedded is not None:
            addend = embedded[:, : query_product.shape[1]].index_select(0, index)
            query_product = query_product + addend
        start = 0 if context is None else len(context)
        query_angles = tuple(x[start:] for x in angles)
        query = norm_and_rotate(
            split_heads(query_product, query_angles), query_norm, query_angles, eps
        )
    if context is not None:
        product_input = torch.cat([context, product_input])
    if key_value_weight is not None:
        key_value_product = linear(product_input, key_value_weight)
        if embedded is not None:
            addend = embedded[:, -key_value_product.shape[1] :].index_select(0, index)
            key_value_product = key_value_product + addend
        key, value = split_heads(key_value_product, angles).chunk(2, 1)
        key = norm_and_rotate(key, key_norm, angles, eps)
        value = value.contiguous()  # once, and not in every later step
    return (
        None if origin is None else hidden,
        None if norm is None and context is None else product_input,
        query,
        key,
        value,
        None if query_norm is None else query_product,
        None if key_norm is None else key_value_product,
    )


def layer_inputs_backward(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Return the gradients of two products, context, hidden states, and the weights of three norms.

    Absent ones are None, here and in the arguments.

    Args:
        rows: hidden states; cosines and sines; the products that norms read; the gradients of
            queries, keys and values, and of keys and values of `context`; other gradients of hidden
            states and of normed ones.
        weights: those of `layer_inputs`.
    """
    hidden, *angles, query_product, key_value_product = rows[:5]
    d_query, d_key, d_value, d_context_key, d_context_value, d_hidden, d_normed = rows[5:]
    norm, query_weight, key_value_weight, query_norm, key_norm = weights
    num_context = 0 if d_context_key is None else len(d_context_key)
    d_key_value = d_context = d_norm = d_query_norm = d_key_norm = None
    if d_key is not None:
        if num_context:
            d_key = torch.cat([d_context_key, d_key])
            d_value = torch.cat([d_context_value, d_value])
        d_key, d_key_norm = norm_and_rotate_backward(
            d_key, key_value_product, key_norm, angles, eps
        )
        d_key_value = torch.cat([d_key, d_value.flatten(1)], 1)
        d_key_value = expand_last_backward(d_key_value, num_context + len(hidden))
        d_input = input_gradient(d_key_value, key_value_weight)
        if num_context:
            d_context, d_input = d_input[:num_context], d_input[num_context:]
        d_normed = d_input if d_normed is None else d_normed + d_input
    if d_query is not None:
        query_angles = tuple(x[num_context:] for x in angles)
        d_query, d_query_norm = norm_and_rotate_backward(
            d_query, query_product, query_norm, query_angles, eps
        )
        d_query = expand_last_backward(d_query, len(hidden))
        d_input = input_gradient(d_query, query_weight)
        d_normed = d_input if d_normed is None else d_normed + d_input
    if norm is not None:
        d_hidden, d_norm = normed_backward(d_normed, hidden, norm, eps, d_hidden)
    else:
        d_hidden = d_normed if d_hidden is None else d_hidden + d_normed
    return d_query, d_key_value, d_context, d_hidden, d_norm, d_query_norm, d_key_norm


def layer_output(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor, ...]:
    """Return the output of a layer [n, H] of attended values and residual, and what the backward
    pass reads; weights: of the output projection, of gate and up as one, of down, and of the norm.
    """
    attended, residual = rows
    output_weight, gate_up_weight, down_weight, norm = weights
    hidden = residual + linear(attended, output_weight)
    normed_hidden = normed(hidden, norm, eps)
    gate_up = linear(normed_hidden, gate_up_weight)
    # torch.compile fuses the reference itself.
    gate = swiglu.reference if torch.compiler.is_compiling() else swiglu
    return hidden + linear(gate(gate_up), down_weight), hidden, normed_hidden, gate_up


def layer_output_backward(rows: Rows, weights: Weights, eps: float) -> tuple[Tensor | None, ...]:
    """Return the gradients of `attended`, of the residual, of gate and up, and of the norm, and the
    input of the down projection; rows: the gradient of the output; hidden, and gate and up.
    """
    gradient, hidden, gate_up = rows
    output_weight, gate_up_weight, down_weight, norm = weights
    inner = input_gradient(gradient, down_weight)
    compiling = torch.compiler.is_compiling()
    gate_backward_ = swiglu_backward_.reference if compiling else swiglu_backward_
    d_gate_up = gate_backward_(gate_up, inner)  # inner becomes silu(gate) · up
    d_normed = input_gradient(d_gate_up, gate_up_weight)
    d_hidden, d_norm = normed_backward(d_normed, hidden, norm, eps, gradient)
    return input_gradient(d_hidden, output_weight), d_hidden, d_gate_up, d_norm, inner


class FusedOps(NamedTuple):
    """Functions above, eager or compiled; each takes rows, weights and an epsilon.

    Attributes:
        convolve_slots: that of `heads/layers.py`, whose gradients autograd computes.
        quantise_weight: quantises a layer's weight [out, in], once a batch; None: products are in
            the dtype of the rows.
    """

    layer_inputs: Callable[..., Any] = layer_inputs
    layer_inputs_backward: Callable[..., Any] = layer_inputs_backward
    layer_output: Callable[..., Any] = layer_output
    layer_output_backward: Callable[..., Any] = layer_output_backward
    convolve_slots: Callable[..., Tensor] = convolve_slots
    quantise_weight: Callable[[Tensor], Fp8Weight] | None = None


FUSED_OPS = FusedOps()
FP8_OPS = FusedOps(quantise_weight=quantise_weight)
