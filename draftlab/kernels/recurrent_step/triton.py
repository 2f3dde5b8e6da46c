"""Triton kernels of `recurrent_step/`: a program has a tile of a state in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.launching import FP_FUSION
from draftlab.kernels.recurrent_step import NORM_EPS

_CHANNELS = 128  # of a program of the convolution
_TILE = 4096  # elements of a state in a program


@triton.jit
def _input_at(x, state, index, x_column, inside, WIDTH: tl.constexpr):
    """Load a row's inputs at column `index`; negative ones are those of its state."""
    if index < 0:
        loaded = tl.load(state + index + WIDTH - 1, mask=inside, other=0.0).to(tl.float32)
    else:
        loaded = tl.load(x + index * x_column, mask=inside, other=0.0).to(tl.float32)
    return loaded


@triton.jit
def convolution_kernel(
    x, weight, bias, pool, rows, counts, output,
    x_row, x_channel, x_column, channels, num_tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK channels of one row. counts: None leaves the pool alone."""
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    own = x + row * x_row + channel * x_channel
    state = pool + (tl.load(rows + row) * channels + channel) * (WIDTH - 1)
    for token in range(num_tokens):
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(WIDTH):
            factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
            source = token - (WIDTH - 1) + tap
            total += factor.to(tl.float32) * _input_at(own, state, source, x_column, inside, WIDTH)
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if SILU:  # of the rounded sum, as when the activation is a kernel of its own
            total = total.to(output.dtype.element_ty).to(tl.float32)
            total = total * tl.sigmoid(total)
        target = output + (row * num_tokens + token) * channels + channel
        tl.store(target, total.to(output.dtype.element_ty), mask=inside)
    if counts is not None:
        count = tl.load(counts + row).to(tl.int32)
        for column in tl.static_range(WIDTH - 1):  # reads at or behind the column that it writes
            kept = _input_at(own, state, count - (WIDTH - 1) + column, x_column, inside, WIDTH)
            tl.store(state + column, kept.to(pool.dtype.element_ty), mask=inside)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)), as exact as log1p where exp(x) is small (Kahan's quotient)."""
    small = tl.exp(-tl.abs(x))
    rounded = 1.0 + small
    quotient = tl.where(rounded == 1.0, 1.0, small / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    log1p = tl.where(rounded == 1.0, small, tl.log(rounded) * quotient)
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def delta_rule_kernel(
    query, key, value, decay, beta, pool, rows, counts, output,
    q_row, q_token, q_head, q_dim, k_row, k_token, k_head, k_dim,
    v_row, v_token, v_head, v_dim, g_row, g_token, g_head, g_dim, b_row, b_token, b_head,
    num_tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEYS_PADDED: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Run the delta rule for BLOCK values of one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KEYS_PADDED)
    is_value, is_key = v < VALUES, k < KEYS
    inside = is_value[:, None] & is_key[None, :]
    at = pool + ((tl.load(rows + row) * HEADS + head) * VALUES + v)[:, None] * KEYS + k[None, :]
    state = tl.load(at, mask=inside, other=0.0)
    q_own = query + row * q_row + (head // GROUP) * q_head + k * q_dim
    k_own = key + row * k_row + (head // GROUP) * k_head + k * k_dim
    v_own = value + row * v_row + head * v_head + v * v_dim
    g_own = decay + row * g_row + head * g_head + k * g_dim
    b_own = beta + row * b_row + head * b_head
    y_own = output + (row * num_tokens * HEADS + head) * VALUES + v
    count = num_tokens
    if counts is not None:
        count = tl.minimum(tl.load(counts + row).to(tl.int32), num_tokens)
    for token in range(count):
        q_t = tl.load(q_own + token * q_token, mask=is_key, other=0.0).to(tl.float32)
        k_t = tl.load(k_own + token * k_token, mask=is_key, other=0.0).to(tl.float32)
        v_t = tl.load(v_own + token * v_token, mask=is_value, other=0.0).to(tl.float32)
        g_t = tl.load(g_own + token * g_token, mask=is_key, other=0.0).to(tl.float32)
        b_t = tl.load(b_own + token * b_token).to(tl.float32)
        if NORMALISE:
            q_t *= tl.rsqrt(tl.sum(q_t * q_t, 0) + EPS)
            k_t *= tl.rsqrt(tl.sum(k_t * k_t, 0) + EPS)
        state *= tl.exp(g_t)[None, :]
        change = (v_t - tl.sum(state * k_t[None, :], 1)) * b_t
        state += change[:, None] * k_t[None, :]
        y = tl.sum(state * (q_t * scale)[None, :], 1)
        tl.store(y_own + token * HEADS * VALUES, y.to(output.dtype.element_ty), mask=is_value)
    if counts is not None:
        tl.store(at, state, mask=inside)


@triton.jit
def selective_scan_kernel(
    x, dt, a, b, c, d, dt_bias, pool, rows, counts, output,
    x_row, x_token, x_head, x_dim, dt_row, dt_token, dt_head, dt_dim,
    b_row, b_token, b_group, b_dim, c_row, c_token, c_group, c_dim,
    a_head, a_value, a_dim, d_head, d_value, bias_head, bias_value,
    num_tokens, low, high,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    KEYS_PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Run a selective scan for BLOCK values of one head of one row."""
    row, head = tl.program_id(0), tl.program_id(1)
    v = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, KEYS_PADDED)
    is_value, is_key = v < VALUES, k < KEYS
    inside = is_value[:, None] & is_key[None, :]
    at = pool + ((tl.load(rows + row) * HEADS + head) * VALUES + v)[:, None] * KEYS + k[None, :]
    state = tl.load(at, mask=inside, other=0.0)
    rate_at = a + head * a_head + v[:, None] * a_value + k[None, :] * a_dim
    rate = tl.load(rate_at, mask=inside, other=0.0).to(tl.float32)
    x_own = x + row * x_row + head * x_head + v * x_dim
    dt_own = dt + row * dt_row + head * dt_head + v * dt_dim
    b_own = b + row * b_row + (head // GROUP) * b_group + k * b_dim
    c_own = c + row * c_row + (head // GROUP) * c_group + k * c_dim
    y_own = output + (row * num_tokens * HEADS + head) * VALUES + v
    if d is not None:
        skip = tl.load(d + head * d_head + v * d_value, mask=is_value, other=0.0).to(tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * bias_head + v * bias_value, mask=is_value, other=0.0)
    count = num_tokens
    if counts is not None:
        count = tl.minimum(tl.load(counts + row).to(tl.int32), num_tokens)
    for token in range(count):
        x_t = tl.load(x_own + token * x_token, mask=is_value, other=0.0).to(tl.float32)
        step = tl.load(dt_own + token * dt_token, mask=is_value, other=0.0).to(tl.float32)
        b_t = tl.load(b_own + token * b_token, mask=is_key, other=0.0).to(tl.float32)
        c_t = tl.load(c_own + token * c_token, mask=is_key, other=0.0).to(tl.float32)
        if dt_bias is not None:
            step += bias.to(tl.float32)
        step = _softplus(step)
        step = tl.minimum(tl.maximum(step, low), high)
        state = state * tl.exp(rate * step[:, None]) + (step * x_t)[:, None] * b_t[None, :]
        y = tl.sum(state * c_t[None, :], 1)
        if d is not None:
            y += skip * x_t
        tl.store(y_own + token * HEADS * VALUES, y.to(output.dtype.element_ty), mask=is_value)
    if counts is not None:
        tl.store(at, state, mask=inside)


def convolution_step(x, weight, bias, pool, rows, counts=None, *, silu) -> Tensor:
    """Launch `recurrent_step.convolution_step`."""
    num_rows, channels, num_tokens = x.shape
    output = x.new_empty(num_rows, num_tokens, channels)
    convolution_kernel[(num_rows, triton.cdiv(channels, _CHANNELS))](
        x,
        weight.contiguous(),
        bias,
        pool,
        rows,
        counts,
        output,
        *x.stride(),
        channels,
        num_tokens,
        WIDTH=weight.shape[1],
        BLOCK=_CHANNELS,
        SILU=silu,
        **FP_FUSION,
    )
    return output.transpose(1, 2)


def delta_rule_step(
    query, key, value, decay, beta, pool, rows, counts=None, *, normalise
) -> Tensor:
    """Launch `recurrent_step.delta_rule_step`."""
    num_rows, num_tokens, heads, values = value.shape
    keys, strides = key.shape[-1], [tensor.stride() for tensor in (query, key, value)]
    strides.append(decay.stride() if decay.ndim == 4 else (*decay.stride(), 0))
    output = query.new_empty(value.shape)
    tile = _tile(keys, values)
    delta_rule_kernel[(num_rows, heads, triton.cdiv(values, tile["BLOCK"]))](
        query,
        key,
        value,
        decay,
        beta,
        pool,
        rows,
        counts,
        output,
        *(stride for of_tensor in strides for stride in of_tensor),
        *beta.stride(),
        num_tokens,
        keys**-0.5,
        HEADS=heads,
        GROUP=heads // key.shape[2],
        EPS=NORM_EPS,
        NORMALISE=normalise,
        **tile,
    )
    return output


def selective_scan_step(
    x, dt, a, b, c, d, dt_bias, pool, rows, counts=None, *, limits=(0.0, float("inf"))
) -> Tensor:
    """Launch `recurrent_step.selective_scan_step`."""
    num_rows, num_tokens, heads, values = x.shape
    keys, output = b.shape[-1], x.new_empty(x.shape)
    strides = [stride for tensor in (x, dt, b, c, a) for stride in tensor.stride()]
    for vector in (d, dt_bias):
        strides += (0, 0) if vector is None else vector.stride()
    tile = _tile(keys, values)
    selective_scan_kernel[(num_rows, heads, triton.cdiv(values, tile["BLOCK"]))](
        x,
        dt,
        a,
        b,
        c,
        d,
        dt_bias,
        pool,
        rows,
        counts,
        output,
        *strides,
        num_tokens,
        *limits,
        HEADS=heads,
        GROUP=heads // b.shape[2],
        **tile,
    )
    return output


def _tile(keys: int, values: int) -> dict[str, int]:
    """Return the kernels' sizes of a state [values, keys], and the launch options."""
    padded = triton.next_power_of_2(keys)
    block = min(max(_TILE // padded, 1), triton.next_power_of_2(values))
    return {"KEYS": keys, "VALUES": values, "KEYS_PADDED": padded, "BLOCK": block} | FP_FUSION
