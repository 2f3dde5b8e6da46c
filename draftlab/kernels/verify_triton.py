"""Verification on a GPU: what `verify.py` decides, without its [B, K + 1, V] of probabilities.

Three launches. `survey` reduces every block of every row of logits to maximum, argmax and Σ exp:
all that p(x) of single tokens needs. `resample` judges the drafts from these (each program for
itself, so that none waits), races over the one row of the vocabulary that the next token comes from
and sums min(p, q). `settle` joins what the blocks found. Sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.noise_triton import ACCEPT, EMIT, exponential, keyed_bits, keyed_uniform
from draftlab.kernels.sampling_triton import entry, load_logits, weights, winner

_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def survey(
    logits, row_stride, depth_stride, vocab, temperatures, tops, sums, bests, num_blocks,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B · WIDTH, blocks), WIDTH = K + 1; what a block found goes to [B, WIDTH, blocks]."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = line // WIDTH
    at = block * SIZE + tl.arange(0, SIZE)
    base = logits + row * row_stride + (line - row * WIDTH) * depth_stride
    x = load_logits(base + at, at < vocab)
    top, best = winner(x)
    out = line * num_blocks + block
    tl.store(tops + out, top)
    tl.store(sums + out, tl.sum(weights(x, top, tl.load(temperatures + row)), 0))
    tl.store(bests + out, block * SIZE + best)


@triton.jit
def _share(weight, total):
    """weight / total; 0 of nothing."""
    return tl.where(total > 0, weight / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _draft_share(pointers, mask, temperature, log_sum):
    """q of draft logits [N], in the reference's rounding; 0 where masked."""
    x = load_logits(pointers, mask)
    # An exact quotient: it may be large, and its rounding would show in the exponential.
    return tl.exp(tl.div_rn(x, tl.zeros_like(x) + temperature) - log_sum)


@triton.jit
def _judge(
    row, logits, row_stride, depth_stride, vocab, drafts, num_drafts, position, seed, prompt,
    temperature, q_logits, q_depth_stride, q_log_sum, q_temperature, drawn, index, tops,
    sums, bests, num_blocks,
    WIDTH: tl.constexpr, DEPTHS: tl.constexpr, BLOCKS: tl.constexpr, HAS_Q: tl.constexpr,
):  # fmt: skip
    """Judges a row's drafts; `drafts`, `q_logits` and `q_log_sum` point to the row's own.

    Returns:
        accepted; of the row of logits after these: maximum, Σ exp, argmax, draft; p of each draft
        [DEPTHS], 0 where none is.
    """
    depth = tl.arange(0, DEPTHS)
    block = tl.arange(0, BLOCKS)
    inside = (depth < WIDTH)[:, None] & (block < num_blocks)[None, :]
    at = (row * WIDTH + depth)[:, None] * num_blocks + block[None, :]
    peaks = tl.load(tops + at, mask=inside, other=float("-inf"))
    top = tl.max(peaks, 1)
    total = tl.load(sums + at, mask=inside, other=0.0) * weights(peaks, top[:, None], temperature)
    total = tl.sum(total, 1)
    best = tl.load(bests + at, mask=inside & (peaks == top[:, None]), other=_NOWHERE)
    best = tl.min(best, 1)

    real = depth < num_drafts
    draft = tl.load(drafts + depth, mask=real, other=-1)
    real = real & (draft >= 0) & (draft < vocab)
    x = load_logits(logits + row * row_stride + depth * depth_stride + draft, real)
    p = _share(weights(x, top, temperature), total)
    p = tl.where(temperature > 0, p, (draft == best).to(tl.float32))
    p = tl.where(real, p, 0.0)
    q = tl.zeros_like(p) + 1.0
    if HAS_Q:
        place = tl.where(drawn, tl.load(index + draft, mask=real, other=-1), -1)
        log_sum = tl.load(q_log_sum + depth, mask=real, other=0.0)
        pointers = q_logits + depth * q_depth_stride + place
        q = tl.where(drawn, _draft_share(pointers, place >= 0, q_temperature, log_sum), q)
    u = keyed_uniform(seed, prompt, position + depth, ACCEPT)
    passed = real & (u * q.to(tl.float64) < p.to(tl.float64))
    accepted = tl.min(tl.where(passed, DEPTHS, depth), 0)
    top = tl.max(tl.where(depth == accepted, top, float("-inf")), 0)
    return accepted, top, entry(total, accepted), entry(best, accepted), entry(draft, accepted), p


@triton.jit
def _overlap(
    block, logits, ids, num_ids, temperature, q_logits, q_log_sum, q_temperature, tops, sums,
    num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Σ min(p, q) over a block of the draft vocabulary; the pointers are those of one draft."""
    part = tl.arange(0, BLOCKS)
    peaks = tl.load(tops + part, mask=part < num_blocks, other=float("-inf"))
    top = tl.max(peaks, 0)
    total = tl.load(sums + part, mask=part < num_blocks, other=0.0)
    total = tl.sum(total * weights(peaks, top, temperature), 0)
    place = block * SIZE + tl.arange(0, SIZE)
    inside = place < num_ids
    x = load_logits(logits + tl.load(ids + place, mask=inside, other=0), inside)
    p = _share(weights(x, top, temperature), total)
    q = _draft_share(q_logits + place, inside, q_temperature, tl.load(q_log_sum))
    return tl.sum(tl.minimum(p, q), 0)


@triton.jit
def resample(
    logits, row_stride, depth_stride, vocab, drafts, draft_stride, num_drafts, positions, seeds,
    prompts, temperatures, q_rows, q_logits, q_row_stride, q_depth_stride, q_log_sum,
    q_temperatures, sampled, ids, index, num_ids, tops, sums, bests, num_blocks,
    accepted_out, emitted_out, probability_out, values, tokens, num_races, overlaps, num_overlaps,
    WIDTH: tl.constexpr, DEPTHS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    HAS_Q: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B, num_races + K · num_overlaps); a greedy row is decided by its first program."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    drafts += row * draft_stride
    temperature = tl.load(temperatures + row)
    drawn = temperature < 0
    q_temperature = temperature
    if HAS_Q:
        drawn = (temperature > 0) & (tl.load(sampled + row) != 0)
        q_temperature = tl.where(drawn, tl.load(q_temperatures + row), 1.0)
        q_row = row
        if q_rows is not None:
            q_row = tl.load(q_rows + row)
        q_logits += q_row * q_row_stride
        q_log_sum += q_row * (WIDTH - 1)
    count = tl.minimum(tl.load(num_drafts + row), WIDTH - 1)
    if part < num_races:
        if (part == 0) | (temperature > 0):
            seed, prompt = tl.load(seeds + row), tl.load(prompts + row)
            position = tl.load(positions + row)
            accepted, top, total, best, draft, p_drafts = _judge(
                row, logits, row_stride, depth_stride, vocab, drafts, count, position, seed,
                prompt, temperature, q_logits, q_depth_stride, q_log_sum, q_temperature, drawn,
                index, tops, sums, bests, num_blocks,
                WIDTH, DEPTHS, BLOCKS, HAS_Q,
            )  # fmt: skip
            if part == 0:
                tl.store(accepted_out + row, accepted)
                tl.store(emitted_out + row, best)
                depth = tl.arange(0, DEPTHS)
                chance = tl.where(drawn, 0.0, p_drafts)
                tl.store(probability_out + row * (WIDTH - 1) + depth, chance, depth < WIDTH - 1)
            if temperature > 0:
                at = part * SIZE + tl.arange(0, SIZE)
                x = load_logits(
                    logits + row * row_stride + accepted * depth_stride + at, at < vocab
                )
                p = _share(weights(x, top, temperature), total)
                rejected = accepted < count
                left = tl.where(rejected & (at == draft), 0.0, p)
                if HAS_Q:
                    less_q = drawn & rejected
                    place = tl.where(less_q, tl.load(index + at, mask=at < vocab, other=-1), -1)
                    log_sum = tl.load(q_log_sum + accepted, less_q, other=0.0)
                    base = q_logits + accepted * q_depth_stride
                    q = _draft_share(base + place, place >= 0, q_temperature, log_sum)
                    left = tl.where(less_q, tl.maximum(p - q, 0.0), left)
                key = keyed_bits(seed, prompt, position + accepted, EMIT)
                noise = exponential(key, at.to(tl.int64))
                out = row * 2 * num_races + part
                value, token = winner(left / noise)
                tl.store(values + out, value)
                tl.store(tokens + out, part * SIZE + token)
                value, token = winner(p / noise)
                tl.store(values + out + num_races, value)
                tl.store(tokens + out + num_races, part * SIZE + token)
    elif HAS_Q:
        depth = (part - num_races) // num_overlaps
        block = part - num_races - depth * num_overlaps
        if drawn & (depth < count):
            total = _overlap(
                block, logits + row * row_stride + depth * depth_stride, ids, num_ids, temperature,
                q_logits + depth * q_depth_stride, q_log_sum + depth, q_temperature,
                tops + (row * WIDTH + depth) * num_blocks,
                sums + (row * WIDTH + depth) * num_blocks, num_blocks, BLOCKS, SIZE,
            )  # fmt: skip
            tl.store(overlaps + (row * (WIDTH - 1) + depth) * num_overlaps + block, total)


@triton.jit
def settle(
    num_drafts, temperatures, sampled, emitted, probability, values, tokens, num_races,
    overlaps, num_overlaps, WIDTH: tl.constexpr, DEPTHS: tl.constexpr, RACES: tl.constexpr,
    OVERLAPS: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the token that won, and Σ min(p, q) of each draft (OVERLAPS = 0: none)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        part = tl.arange(0, RACES)
        at = row * 2 * num_races + part
        value, first = winner(tl.load(values + at, mask=part < num_races, other=0.0))
        token = entry(tl.load(tokens + at, mask=part < num_races, other=0), first)
        if value <= 0:
            # Where p = q up to rounding nothing is left to recover from; p itself is then exact.
            at += num_races
            value, first = winner(tl.load(values + at, mask=part < num_races, other=0.0))
            token = entry(tl.load(tokens + at, mask=part < num_races, other=0), first)
        tl.store(emitted + row, token)
        if OVERLAPS > 0:
            depth, block = tl.arange(0, DEPTHS), tl.arange(0, OVERLAPS)
            count = tl.minimum(tl.load(num_drafts + row), WIDTH - 1)
            real = depth < tl.where(tl.load(sampled + row) != 0, count, 0)
            at = (row * (WIDTH - 1) + depth)[:, None] * num_overlaps + block[None, :]
            mask = real[:, None] & (block < num_overlaps)[None, :]
            total = tl.sum(tl.load(overlaps + at, mask=mask, other=0.0), 1)
            tl.store(probability + row * (WIDTH - 1) + depth, total, mask=real)
