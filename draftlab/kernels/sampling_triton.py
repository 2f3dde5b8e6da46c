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

from draftlab.kernels.dependent_launch import launch_options
from draftlab.kernels.noise_triton import DRAFT, EMIT, exponential, keyed_bits
from draftlab.kernels.rows import RowKeys
from draftlab.kernels.verify import has_limits, limit_logits

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


@triton.jit(do_not_specialize=["ahead"])
def _draw(
    logits, stride, vocab, positions, ahead, seeds, prompts, temperatures, sampled,
    tops, sums, values, bests, tokens, num_blocks,
    PURPOSE: tl.constexpr, SIZE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B, blocks); what a block found goes to [B, blocks].

    `temperatures` None: every row is greedy, and no sums are needed. `sampled` may forbid a race.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * SIZE + tl.arange(0, SIZE)
    x = load_logits(logits + row * stride + at, at < vocab)
    top, best = winner(x)
    out = row * num_blocks + block
    tl.store(tops + out, top)
    tl.store(bests + out, block * SIZE + best)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        races = temperature > 0
        if sampled is not None:
            races = races & (tl.load(sampled + row) != 0)
        weight = weights(x, top, temperature)
        tl.store(sums + out, tl.sum(weight, 0))
        if races:
            position = tl.load(positions + row) + ahead
            key = keyed_bits(tl.load(seeds + row), tl.load(prompts + row), position, PURPOSE)
            value, token = winner(weight / exponential(key, at.to(tl.int64)))
            tl.store(values + out, value)
            tl.store(tokens + out, block * SIZE + token)


@triton.jit
def _join(
    temperatures, sampled, tops, sums, values, bests, tokens, ids, chosen, log_sum, num_blocks,
    BLOCKS: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the winner of a row's blocks, and logsumexp(logits / temperature).

    `ids`: what the winner is called; None: by its index.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = row * num_blocks + block
    peaks = tl.load(tops + at, mask=inside, other=float("-inf"))
    top, first = winner(peaks)
    found = entry(tl.load(bests + at, mask=inside, other=0), first)
    if temperatures is not None:
        temperature = tl.load(temperatures + row)
        races = temperature > 0
        if sampled is not None:
            races = races & (tl.load(sampled + row) != 0)
        scale = weights(peaks, top, temperature)
        total = tl.sum(tl.load(sums + at, mask=inside, other=0.0) * scale, 0)
        divisor = tl.where(temperature > 0, temperature, 1.0)
        tl.store(log_sum + row, top / divisor + tl.log(total))
        if races:
            _, first = winner(tl.load(values + at, mask=inside, other=0.0) * scale)
            found = entry(tl.load(tokens + at, mask=inside, other=0), first)
    found = found.to(tl.int64)
    if ids is not None:
        found = tl.load(ids + found)
    tl.store(chosen + row, found)


def _sample(
    logits: Tensor,
    positions: Tensor | None,
    ahead: int,
    rows: RowKeys | None,
    temperature: Tensor | None,
    sampled: Tensor | None,
    ids: Tensor | None,
    purpose: tl.constexpr,
    out: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Both launches; without rows and a temperature every row takes its argmax."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(vocab, BLOCK)
    found = logits.new_empty(3, num_rows, num_blocks, dtype=torch.float32)
    where = logits.new_empty(2, num_rows, num_blocks, dtype=torch.int32)
    if out is None:
        out = (
            logits.new_empty(num_rows, dtype=torch.int64),
            logits.new_empty(num_rows, dtype=torch.float32),
        )
    options = launch_options(logits.device)
    with torch.cuda.device_of(logits):
        _draw[(num_rows, num_blocks)](
            logits,
            logits.stride(0),
            vocab,
            None if positions is None else positions.contiguous(),
            ahead,
            None if rows is None else rows.seed.contiguous(),
            None if rows is None else rows.prompt.contiguous(),
            None if temperature is None else temperature.contiguous(),
            sampled,
            *found,
            *where,
            num_blocks,
            PURPOSE=purpose,
            SIZE=BLOCK,
            **options,
        )
        _join[(num_rows,)](
            None if temperature is None else temperature.contiguous(),
            sampled,
            *found,
            *where,
            ids,
            *out,
            num_blocks,
            BLOCKS=triton.next_power_of_2(num_blocks),
            num_warps=1 if num_blocks <= 128 else 4,
            **options,
        )
    return out


def sample_first(
    logits: Tensor, positions: Tensor, rows: RowKeys, *, limited: bool | None = None
) -> Tensor:
    """As `verify.sample_first`."""
    if has_limits(rows, limited):
        logits = limit_logits(logits[:, None], rows)[:, 0]
    return _sample(logits, positions, 0, rows, rows.temperature, None, None, EMIT, None)[0]


def sample_draft(
    logits: Tensor,
    positions: Tensor,
    rows: RowKeys,
    temperature: Tensor,
    sampled: Tensor,
    *,
    ids: Tensor | None = None,
    ahead: int = 0,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """As `verify.sample_draft`."""
    flags = sampled.contiguous()
    return _sample(logits, positions, ahead, rows, temperature, flags, ids, DRAFT, out)


def argmax_draft(logits: Tensor, *, ids: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """As `verify.argmax_draft`."""
    places = None if out is None else (out, out)  # there is no second result
    return _sample(logits, None, 0, None, None, None, ids, DRAFT, places)[0]
