"""Convolutions and recurrences over the few tokens of a decode step, from each request's state.

    convolution      y_t = f(b + Σ_j w_j x_{t−W+1+j})                          state: W − 1 inputs
    delta rule       S ← exp(g_t) S;  S ← S + β_t (v_t − S k_t) k_tᵀ;  y_t = S q_t
    selective scan   S ← exp(A Δ_t) S + Δ_t x_t B_tᵀ;  y_t = S C_t + D x_t

The delta rule is that of gated delta networks (Yang et al., arXiv:2412.06464) and of Kimi Linear,
where g has a value for each key dimension (arXiv:2510.26692); the selective scan is Mamba's
(arXiv:2312.00752) and Mamba 2's (arXiv:2405.21060). States S [values, keys] are float32 here.

Rows of a pool are the states of requests. Without `counts` an operator computes outputs and leaves
the pool alone. With it, the pool gets each row's state after its first `counts` tokens, and the
outputs of later tokens are undefined. So a verify step calls an operator twice: for the outputs,
and for the state after the accepted tokens. That moves a state three times, whatever K is; a copy
after each token would move it K + 4 times.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator

NORM_EPS = 1e-6
"""Of the norms of queries and keys, as in the flash-linear-attention library."""


@triton_operator("recurrent_step.triton")
def convolution_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    rows: Tensor,
    counts: Tensor | None = None,
    *,
    silu: bool,
) -> Tensor:
    """Return a causal depthwise convolution [B, C, M] of the inputs before and of M tokens.

    Args:
        x: [B, C, M].
        weight, bias: [C, W] and [C].
        pool: [P, C, W − 1], the last inputs of each row, the oldest first.
        rows: int64 [B], rows of the pool.
        counts: int64 [B]; see above.
        silu: whether SiLU follows.
    """
    inputs = torch.cat([pool[rows], x], -1)
    y = F.conv1d(inputs, weight[:, None], bias, groups=len(weight))
    if counts is not None:
        columns = counts[:, None] + torch.arange(pool.shape[-1], device=x.device)
        pool[rows] = inputs.gather(2, columns[:, None].expand(-1, x.shape[1], -1))
    return F.silu(y) if silu else y


@triton_operator("recurrent_step.triton")
def delta_rule_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    pool: Tensor,
    rows: Tensor,
    counts: Tensor | None = None,
    *,
    normalise: bool,
) -> Tensor:
    """Return outputs [B, M, H, V] of the gated delta rule, in the queries' dtype.

    Args:
        query, key: [B, M, Hk, K]; H is a multiple of Hk.
        value: [B, M, H, V].
        decay: g, [B, M, H] or [B, M, H, K].
        beta: [B, M, H].
        pool: float32 [P, H, V, K].
        rows, counts: as of `convolution_step`.
        normalise: whether queries and keys are divided by their norms.
    """
    dtype = query.dtype
    query, key, value, decay, beta = (x.float() for x in (query, key, value, decay, beta))
    if normalise:
        query, key = (x * (x.square().sum(-1, True) + NORM_EPS).rsqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    group = value.shape[2] // key.shape[2]
    query, key = (x.repeat_interleave(group, 2) for x in (query, key))
    factor = (decay if decay.ndim == 4 else decay[..., None]).exp()
    state, outputs = pool[rows], []
    for t in range(query.shape[1]):
        k = key[:, t, :, None]
        new = state * factor[:, t, :, None]
        change = (value[:, t] - (new * k).sum(-1)) * beta[:, t, :, None]
        new = new + change[..., None] * k
        outputs.append((new * query[:, t, :, None]).sum(-1))
        state = _advance(state, new, counts, t)
    if counts is not None:
        pool[rows] = state
    return torch.stack(outputs, 1).to(dtype)


@triton_operator("recurrent_step.triton")
def selective_scan_step(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    rows: Tensor,
    counts: Tensor | None = None,
    *,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Return outputs [B, M, H, V] of a selective scan, in the dtype of `x`.

    Δ = clamp(softplus(dt + dt_bias), *limits). Mamba 2 has one Δ and A for each head, Mamba has
    one head and H · V of them: both are views of the shapes below.

    Args:
        x, dt: [B, M, H, V].
        a: A, [H, V, K].
        b, c: B and C, [B, M, G, K]; H is a multiple of G.
        d, dt_bias: [H, V].
        pool: float32 [P, H, V, K].
        rows, counts: as of `convolution_step`.
    """
    dtype, a = x.dtype, a.float()
    x, dt, b, c = (tensor.float() for tensor in (x, dt, b, c))
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias.float()).clamp(*limits)
    group = x.shape[2] // b.shape[2]
    b, c = (tensor.repeat_interleave(group, 2) for tensor in (b, c))
    state, outputs = pool[rows], []
    for t in range(x.shape[1]):
        step = dt[:, t, :, :, None]
        new = state * (a * step).exp() + step * x[:, t, :, :, None] * b[:, t, :, None]
        outputs.append((new * c[:, t, :, None]).sum(-1))
        state = _advance(state, new, counts, t)
    if counts is not None:
        pool[rows] = state
    y = torch.stack(outputs, 1)
    return (y if d is None else y + x * d.float()).to(dtype)


def _advance(state: Tensor, new: Tensor, counts: Tensor | None, t: int) -> Tensor:
    """Return the states after token `t`, those of rows with fewer counted tokens unchanged."""
    if counts is None:
        return new
    return new.where((counts > t)[:, None, None, None], state)
