"""Sampling one token a row on a GPU: the kernels behind `verify.sample_first` and `sample_draft`.

Two launches. `_draw` reduces each block of the vocabulary to its maximum, argmax and Σ exp and
races over it with weights relative to that maximum; `_join` puts the blocks on one scale. Sums have
a fixed order. Logits become float32 on load; NaN counts as −inf, and where nothing at all is left
the token is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftlab.kernels.noise_triton import DRAFT, EMIT, exponential, keyed_bits
from draftlab.kernels.verify import RowKeys, has_limits, limit_logits

BLOCK = 1024  # tokens a program races over


@triton.jit
def load_logits(pointers, mask):
    """float32 logits; NaN and what is masked is −inf, and +inf the largest number."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(mask & (x == x), x, float("-inf"))
    return tl.minimum(x, 3.4028234663852886e38)


@triton.jit
def weights(x, top, temperature):
    """exp((x − top) / temperature) of logits ≤ top; 0 where all are −inf, 1 divides greedy rows."""
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    return tl.exp((x - tl.where(top == float("-inf"), 0.0, top)) * inverse)


@triton.jit
def winner(values):
    """The largest of values [N] and its index; ties to the lowest."""
    return tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)


@triton.jit
def entry(values, at):
    """values[at] of a vector [N]."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == at, values, 0), 0)


@triton.jit
def _draw(
    logits, stride, vocab, positions, seeds, prompts, temperatures, sampled,
    tops, sums, values, bests, tokens, num_blocks,
    PURPOSE: tl.constexpr, FLAGGED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks); what a block found goes to [B, blocks]. FLAGGED: `sampled` may forbid."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    races = temperature > 0
    if FLAGGED:
        races = races & (tl.load(sampled + row) != 0)
    at = block * SIZE + tl.arange(0, SIZE)
    x = load_logits(logits + row * stride + at, at < vocab)
    top, best = winner(x)
    weight = weights(x, top, temperature)
    out = row * num_blocks + block
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(weight, 0))
    tl.store(bests + out, block * SIZE + best)
    if races:
        position = tl.load(positions + row)
        key = keyed_bits(tl.load(seeds + row), tl.load(prompts + row), position, PURPOSE)
        value, token = winner(weight / exponential(key, at.to(tl.int64)))
        tl.store(values + out, value)
        tl.store(tokens + out, block * SIZE + token)


@triton.jit
def _join(
    temperatures, sampled, tops, sums, values, bests, tokens, chosen, log_sum, num_blocks,
    FLAGGED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the winner of a row's blocks, and logsumexp(logits / temperature)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    races = temperature > 0
    if FLAGGED:
        races = races & (tl.load(sampled + row) != 0)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = row * num_blocks + block
    peaks = tl.load(tops + at, mask=inside, other=float("-inf"))
    top, first = winner(peaks)
    scale = weights(peaks, top, temperature)
    total = tl.sum(tl.load(sums + at, mask=inside, other=0.0) * scale, 0)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    tl.store(log_sum + row, top / divisor + tl.log(total))
    if races:
        _, first = winner(tl.load(values + at, mask=inside, other=0.0) * scale)
        tl.store(chosen + row, entry(tl.load(tokens + at, mask=inside, other=0), first))
    else:
        tl.store(chosen + row, entry(tl.load(bests + at, mask=inside, other=0), first))


def _sample(
    logits: Tensor,
    positions: Tensor,
    rows: RowKeys,
    temperature: Tensor,
    sampled: Tensor | None,
    purpose: tl.constexpr,
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    found = logits.new_empty(3, num_rows, num_blocks, dtype=torch.float32)
    where = logits.new_empty(2, num_rows, num_blocks, dtype=torch.int32)
    chosen = logits.new_empty(num_rows, dtype=torch.int64)
    log_sum = logits.new_empty(num_rows, dtype=torch.float32)
    flagged = sampled is not None
    _draw[(num_rows, num_blocks)](
        logits,
        logits.stride(0),
        vocab,
        positions.contiguous(),
        rows.seed.contiguous(),
        rows.prompt.contiguous(),
        temperature.contiguous(),
        sampled,
        *found,
        *where,
        num_blocks,
        PURPOSE=purpose,
        FLAGGED=flagged,
        SIZE=BLOCK,
    )
    _join[(num_rows,)](
        temperature.contiguous(),
        sampled,
        *found,
        *where,
        chosen,
        log_sum,
        num_blocks,
        FLAGGED=flagged,
        BLOCKS=triton.next_power_of_2(num_blocks),
        num_warps=1 if num_blocks <= 128 else 4,
    )
    return chosen, log_sum


def sample_first(
    logits: Tensor, positions: Tensor, rows: RowKeys, *, limited: bool | None = None
) -> Tensor:
    """As `verify.sample_first`."""
    if has_limits(rows, limited):
        logits = limit_logits(logits[:, None], rows)[:, 0]
    return _sample(logits, positions, rows, rows.temperature, None, EMIT)[0]


def sample_draft(
    logits: Tensor, positions: Tensor, rows: RowKeys, temperature: Tensor, sampled: Tensor
) -> tuple[Tensor, Tensor]:
    """As `verify.sample_draft`."""
    return _sample(logits, positions, rows, temperature, sampled.contiguous(), DRAFT)
