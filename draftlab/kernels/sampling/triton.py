"""Triton kernels of `sampling/`: one token a row, in two launches.

`sample_blocks` reduces each block of the vocabulary to its maximum, argmax and Σ exp, and runs the
exponential race over it with weights relative to that maximum. `reduce_blocks` brings the blocks to
one scale and picks the winner. Sums have a fixed order. Logits become float32 on load; NaN counts
as −inf, and where every logit does, the token is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.launching import launch_options
from draftlab.kernels.noise.triton import DRAFT, EMIT, exponential, keyed_bits
from draftlab.kernels.sampling import SMALLEST_DOUBT, apply_top_k_top_p, uses_top_k_top_p
from draftlab.kernels.sampling.types import SamplingMetadata

BLOCK = 1024  # tokens of one program
_SMALLEST_DOUBT = tl.constexpr(SMALLEST_DOUBT)


@triton.jit
def load_logits(pointers, mask):
    """Return float32 logits: −inf where NaN or masked, the largest number for +inf."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(mask & (x == x), x, float("-inf"))
    return tl.minimum(x, 3.4028234663852886e38)


@triton.jit
def exp_scaled(x, top, temperature):
    """Return exp((x − top) / temperature) for logits x ≤ top; greedy rows are divided by 1."""
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) * inverse)


@triton.jit
def max_index(values):
    """Return the maximum of values [N] and its index; ties go to the lowest."""
    return tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def element(values, at):
    """Return values[at] of a vector [N]."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == at, values, 0), 0)


@triton.jit(do_not_specialize=["offset"])
def sample_blocks(
    logits, stride, vocab, positions, offset, seeds, prompts, temperatures, block_max,
    block_sum, race_values, block_argmax, race_tokens, num_blocks,
    PURPOSE: tl.constexpr, SIZE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Reduce one block of one row; grid (B, blocks), results [B, blocks].

    temperatures: None if every row is greedy; then no sums are needed.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * SIZE + tl.arange(0, SIZE)
    x = load_logits(logits + row * stride + at, at < vocab)
    top, best = max_index(x)
    out = row * num_blocks + block
    tl.store(block_max + out, top)
    tl.store(block_argmax + out, block * SIZE + best)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        weight = exp_scaled(x, top, temperature)
        tl.store(block_sum + out, tl.sum(weight, 0))
        if temperature > 0:
            position = tl.load(positions + row) + offset
            key = keyed_bits(tl.load(seeds + row), tl.load(prompts + row), position, PURPOSE)
            value, token = max_index(weight / exponential(key, at.to(tl.int64)))
            tl.store(race_values + out, value)
            tl.store(race_tokens + out, block * SIZE + token)


@triton.jit
def reduce_blocks(
    temperatures, block_max, block_sum, race_values, block_argmax, race_tokens, ids, tokens_out,
    log_sum_out, confidence_out, num_blocks, BLOCKS: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Write the token of a row's blocks and logsumexp(logits / temperature); grid (B,).

    ids: token ids by index; None writes the index. confidence_out: None writes none.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = row * num_blocks + block
    maxima = tl.load(block_max + at, mask=inside, other=float("-inf"))
    top, first = max_index(maxima)
    token = element(tl.load(block_argmax + at, mask=inside, other=0), first)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        scale = exp_scaled(maxima, top, temperature)
        total = tl.sum(tl.load(block_sum + at, mask=inside, other=0.0) * scale, 0)
        divisor = tl.where(temperature > 0, temperature, 1.0)
        tl.store(log_sum_out + row, top / divisor + tl.log(total))
        if confidence_out is not None:
            tl.store(confidence_out + row, -tl.log(tl.maximum(total - 1.0, _SMALLEST_DOUBT)))
        if temperature > 0:
            _, first = max_index(tl.load(race_values + at, mask=inside, other=0.0) * scale)
            token = element(tl.load(race_tokens + at, mask=inside, other=0), first)
    token = token.to(tl.int64)
    if ids is not None:
        token = tl.load(ids + token)
    tl.store(tokens_out + row, token)


def _sample(
    logits: Tensor,
    purpose: tl.constexpr,
    keys: tuple[Tensor | int | None, ...] = (None, 0, None, None),
    temperature: Tensor | None = None,
    ids: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    confidence: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch both kernels; without a temperature every row takes its argmax.

    Args:
        keys: positions and their offset, seeds, prompts.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    sums_and_values = logits.new_empty(3, num_rows, num_blocks, dtype=torch.float32)
    indices = logits.new_empty(2, num_rows, num_blocks, dtype=torch.int32)
    if out is None:
        out = (
            logits.new_empty(num_rows, dtype=torch.int64),
            logits.new_empty(num_rows, dtype=torch.float32),
        )
    options = launch_options(logits.device)
    sample_blocks[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        vocab,
        *keys,
        temperature,
        *sums_and_values,
        *indices,
        num_blocks,
        PURPOSE=purpose,
        SIZE=BLOCK,
        **options,
    )
    reduce_blocks[(num_rows,)](
        temperature,
        *sums_and_values,
        *indices,
        ids,
        *out,
        confidence,
        num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1 if num_blocks <= 128 else 4,
        **options,
    )
    return out


def sample_token(logits, positions, rows, *, limited=None) -> Tensor:
    """Launch `sampling.sample_token`."""
    if uses_top_k_top_p(rows, limited):
        logits = apply_top_k_top_p(logits[:, None], rows)[:, 0]
    return _sample(logits, EMIT, _keys(positions, 0, rows), rows.temperature.contiguous())[0]


def sample_draft(
    logits, positions, rows, *, ids=None, offset=0, out=None, confidence=None
) -> tuple[Tensor, Tensor]:
    """Launch `sampling.sample_draft`."""
    keys, temperature = _keys(positions, offset, rows), rows.temperature.contiguous()
    return _sample(logits, DRAFT, keys, temperature, ids, out, confidence)


def argmax_draft(logits, *, ids=None, out=None) -> Tensor:
    """Launch `sampling.argmax_draft`."""
    outputs = None if out is None else (out, out)  # there is no second result
    return _sample(logits, DRAFT, ids=ids, out=outputs)[0]


def _keys(positions: Tensor, offset: int, rows: SamplingMetadata) -> tuple[Tensor | int, ...]:
    """Return the kernel's arguments of the noise."""
    return positions.contiguous(), offset, rows.seed.contiguous(), rows.prompt.contiguous()
