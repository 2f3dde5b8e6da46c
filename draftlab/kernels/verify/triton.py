"""Triton kernels of `verify/`: rejection sampling without a table of [B, K + 1, V] probabilities.

Three launches (`verify/launch.py`). `reduce_logits` reduces every block of every row of logits to
its maximum, argmax and Σ exp, which is all that p(x) of single tokens needs.
`reject_and_resample` accepts or rejects the drafts from these (each program for itself, so that
none waits), runs the exponential race over a block of the row that the next token comes from, and
sums min(p, q). `finalize` reduces the blocks' results. Sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftlab.kernels.noise import BLOCK_STRIDE
from draftlab.kernels.noise.triton import ACCEPT, EMIT, exponential, keyed_bits, keyed_uniform
from draftlab.kernels.sampling.triton import element, exp_scaled, load_logits, max_index

_NO_INDEX = tl.constexpr(2**31 - 1)
_STRIDE = tl.constexpr(BLOCK_STRIDE)
TOKEN, OVERLAPS, BLOCK = (tl.constexpr(i) for i in range(3))  # what `reject_and_resample` does


@triton.jit
def reduce_logits(
    logits, row_stride, depth_stride, vocab, temperatures, num_drafts, block_max, block_sum,
    block_argmax, num_blocks,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Reduce one block; grid (B · WIDTH, blocks), WIDTH = K + 1, results [B, WIDTH, blocks].

    Rows of logits behind the last verified draft are not read.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    logits_row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits_row // WIDTH
    at = block * SIZE + tl.arange(0, SIZE)
    depth = logits_row - row * WIDTH
    if depth > tl.load(num_drafts + row):
        return
    base = logits + row * row_stride + depth * depth_stride
    x = load_logits(base + at, at < vocab)
    top, best = max_index(x)
    out = logits_row * num_blocks + block
    tl.store(block_max + out, top)
    tl.store(block_sum + out, tl.sum(exp_scaled(x, top, tl.load(temperatures + row)), 0))
    tl.store(block_argmax + out, block * SIZE + best)


@triton.jit
def _normalize(weight, total):
    """Return weight / total, 0 where the total is 0."""
    return tl.where(total > 0, weight / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _draft_prob(pointers, mask, temperature, log_sum):
    """Return q of draft logits [N], rounded as the reference rounds; 0 where masked."""
    x = load_logits(pointers, mask)
    # The quotient is exact: it may be large, and the exponential would magnify its rounding.
    return tl.exp(tl.div_rn(x, tl.zeros_like(x) + temperature) - log_sum)


@triton.jit
def _reach(p, q, DEPTHS: tl.constexpr):
    """Return r_d = min(r_{d−1} · p_{d−1} / q_{d−1}, 1), r_0 = 1, of p and q [DEPTHS] of drafts."""
    depth = tl.arange(0, DEPTHS)
    reach = tl.zeros_like(p) + 1.0
    last = tl.sum(tl.where(depth == 0, reach, 0.0), 0)
    for i in range(DEPTHS - 1):
        last = tl.minimum(tl.div_rn(last * element(p, i), element(q, i)), 1.0)
        reach = tl.where(depth == i + 1, last, reach)
    return reach


@triton.jit
def _accept(
    row, logits, depth_stride, vocab, drafts, num_drafts, position, seed, prompt,
    temperature, q_logits, q_depth_stride, q_log_sum, q_temperature, q_sampled, index, block_max,
    block_sum, block_argmax, num_blocks, overlaps, num_overlaps,
    WIDTH: tl.constexpr, DEPTHS: tl.constexpr, BLOCKS: tl.constexpr, HAS_Q: tl.constexpr,
    SUMS: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Accept the longest prefix of a row's drafts with u · q(x) < p(x), or by blocks.

    logits, drafts, q_logits and q_log_sum point to this row.

    Returns:
        The number accepted; maximum, Σ exp, argmax and draft of the row of logits after these; the
        probability to accept each draft [DEPTHS], 0 where there is none; r of each depth [DEPTHS],
        1 in token verification.
    """
    depth = tl.arange(0, DEPTHS)
    block = tl.arange(0, BLOCKS)
    inside = (depth < WIDTH)[:, None] & (block < num_blocks)[None, :]
    at = (row * WIDTH + depth)[:, None] * num_blocks + block[None, :]
    maxima = tl.load(block_max + at, mask=inside, other=float("-inf"))
    top = tl.max(maxima, 1)
    sums = tl.load(block_sum + at, mask=inside, other=0.0)
    total = tl.sum(sums * exp_scaled(maxima, top[:, None], temperature), 1)
    best = tl.load(block_argmax + at, mask=inside & (maxima == top[:, None]), other=_NO_INDEX)
    best = tl.min(best, 1)

    is_draft = depth < num_drafts
    draft = tl.load(drafts + depth, mask=is_draft, other=-1)
    is_draft = is_draft & (draft >= 0) & (draft < vocab)
    x = load_logits(logits + depth * depth_stride + draft, is_draft)
    p = _normalize(exp_scaled(x, top, temperature), total)
    p = tl.where(temperature > 0, p, (draft == best).to(tl.float32))
    p = tl.where(is_draft, p, 0.0)
    q = tl.zeros_like(p) + 1.0
    if HAS_Q:
        q_index = tl.where(q_sampled, tl.load(index + draft, mask=is_draft, other=-1), -1)
        log_sum = tl.load(q_log_sum + depth, mask=is_draft, other=0.0)
        pointers = q_logits + depth * q_depth_stride + q_index
        q = tl.where(q_sampled, _draft_prob(pointers, q_index >= 0, q_temperature, log_sum), q)
    u = keyed_uniform(seed, prompt, position + depth, ACCEPT)
    is_accepted = is_draft & (u * q.to(tl.float64) < p.to(tl.float64))
    accepted = tl.min(tl.where(is_accepted, DEPTHS, depth), 0)
    reach = tl.zeros_like(p) + 1.0
    if MODE != TOKEN:
        reach = tl.where(q_sampled, _reach(p, q, DEPTHS), reach)
    if MODE == BLOCK:
        part = tl.arange(0, SUMS)
        at = depth[:, None] * num_overlaps + part[None, :]
        mask = (depth < tl.where(q_sampled, num_drafts, 0))[:, None] & (part < num_overlaps)[
            None, :
        ]
        overlap = tl.sum(tl.load(overlaps + at, mask=mask, other=0.0), 1)
        # The draft before depth d is number d − 1; its prefix has d drafts.
        u = keyed_uniform(seed, prompt, position * _STRIDE + (depth - 1), ACCEPT)
        after, r = overlap.to(tl.float64), reach.to(tl.float64)
        passes = (u * (1.0 - after) < r - after) | (reach >= 1)
        longest = tl.max(tl.where(passes & (depth <= num_drafts), depth, 0), 0)
        accepted = tl.where(q_sampled, longest, accepted)
        p = tl.where(q_sampled, tl.div_rn(overlap, tl.maximum(reach, 1.1754943508222875e-38)), p)
    top = tl.max(tl.where(depth == accepted, top, float("-inf")), 0)
    total, best = element(total, accepted), element(best, accepted)
    return accepted, top, total, best, element(draft, accepted), p, reach


@triton.jit
def _overlap(
    block, scale, logits, ids, num_ids, temperature, q_logits, q_log_sum, q_temperature, block_max,
    block_sum, num_blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Return Σ min(scale · p, q) over a block of the draft vocabulary, of one draft's pointers."""
    part = tl.arange(0, BLOCKS)
    maxima = tl.load(block_max + part, mask=part < num_blocks, other=float("-inf"))
    top = tl.max(maxima, 0)
    total = tl.load(block_sum + part, mask=part < num_blocks, other=0.0)
    total = tl.sum(total * exp_scaled(maxima, top, temperature), 0)
    q_index = block * SIZE + tl.arange(0, SIZE)
    inside = q_index < num_ids
    x = load_logits(logits + tl.load(ids + q_index, mask=inside, other=0), inside)
    p = _normalize(exp_scaled(x, top, temperature), total)
    q = _draft_prob(q_logits + q_index, inside, q_temperature, tl.load(q_log_sum))
    return tl.sum(tl.minimum(scale * p, q), 0)


@triton.jit
def reject_and_resample(
    logits, row_stride, depth_stride, vocab, drafts, draft_stride, num_drafts,
    positions, seeds, prompts, temperatures, q_rows, q_logits, q_row_stride, q_depth_stride,
    q_log_sum, q_temperatures, ids, index, num_ids, block_max, block_sum, block_argmax, num_blocks,
    accepted_out, emitted_out, probability_out, race_values, race_tokens, num_races, overlaps,
    num_overlaps,
    WIDTH: tl.constexpr, DEPTHS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    SUMS: tl.constexpr, HAS_Q: tl.constexpr, MODE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Verify a row and resample one block of it, or sum one block of min(p, q).

    Token verification does both at once, with a grid (B, num_races + K · num_overlaps). Block
    verification needs the sums of min(r · p, q) before: a launch with the mode OVERLAPS and a grid
    (B, K · num_overlaps), then one with BLOCK and (B, num_races). Only the first program of a
    greedy row has work.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    drafts += row * draft_stride
    logits += row * row_stride
    temperature = tl.load(temperatures + row)
    q_sampled = temperature < 0
    q_temperature = temperature
    if HAS_Q:
        q_sampled = temperature > 0
        q_temperature = tl.where(q_sampled, tl.load(q_temperatures + row), 1.0)
        q_row = row
        if q_rows is not None:
            q_row = tl.load(q_rows + row)
        q_logits += q_row * q_row_stride
        q_log_sum += q_row * (WIDTH - 1)
    count = tl.minimum(tl.load(num_drafts + row), WIDTH - 1)
    first_sum = 0 if MODE == OVERLAPS else num_races
    if program < first_sum:
        if (program == 0) | (temperature > 0):
            seed, prompt = tl.load(seeds + row), tl.load(prompts + row)
            position = tl.load(positions + row)
            accepted, top, total, best, draft, p_drafts, reach = _accept(
                row, logits, depth_stride, vocab, drafts, count, position, seed, prompt,
                temperature, q_logits, q_depth_stride, q_log_sum, q_temperature, q_sampled,
                index, block_max, block_sum, block_argmax, num_blocks,
                overlaps + row * (WIDTH - 1) * num_overlaps, num_overlaps,
                WIDTH, DEPTHS, BLOCKS, HAS_Q, SUMS, MODE,
            )  # fmt: skip
            if program == 0:
                tl.store(accepted_out + row, accepted)
                tl.store(emitted_out + row, best)
                depth = tl.arange(0, DEPTHS)
                probability = p_drafts
                if MODE == TOKEN:  # sums of min(p, q) follow in `finalize`
                    probability = tl.where(q_sampled, 0.0, p_drafts)
                out = row * (WIDTH - 1) + depth
                tl.store(probability_out + out, probability, depth < WIDTH - 1)
            if temperature > 0:
                at = program * SIZE + tl.arange(0, SIZE)
                x = load_logits(logits + accepted * depth_stride + at, at < vocab)
                p = _normalize(exp_scaled(x, top, temperature), total)
                rejected = accepted < count
                # The residual: max(p − q, 0), or p without the draft where q is one-hot.
                residual = tl.where(rejected & (at == draft), 0.0, p)
                if HAS_Q:
                    uses_q = q_sampled & rejected
                    q_index = tl.where(uses_q, tl.load(index + at, mask=at < vocab, other=-1), -1)
                    log_sum = tl.load(q_log_sum + accepted, uses_q, other=0.0)
                    pointers = q_logits + accepted * q_depth_stride + q_index
                    q = _draft_prob(pointers, q_index >= 0, q_temperature, log_sum)
                    residual = tl.where(
                        uses_q, tl.maximum(element(reach, accepted) * p - q, 0.0), residual
                    )
                key = keyed_bits(seed, prompt, position + accepted, EMIT)
                noise = exponential(key, at.to(tl.int64))
                out = row * 2 * num_races + program
                value, token = max_index(residual / noise)
                tl.store(race_values + out, value)
                tl.store(race_tokens + out, program * SIZE + token)
                value, token = max_index(p / noise)
                tl.store(race_values + out + num_races, value)
                tl.store(race_tokens + out + num_races, program * SIZE + token)
    elif HAS_Q:
        depth = (program - first_sum) // num_overlaps
        block = program - first_sum - depth * num_overlaps
        if q_sampled & (depth < count):
            scale = 1.0
            if MODE == OVERLAPS:
                _, _, _, _, _, _, reach = _accept(
                    row, logits, depth_stride, vocab, drafts, count,
                    tl.load(positions + row), tl.load(seeds + row), tl.load(prompts + row),
                    temperature, q_logits, q_depth_stride, q_log_sum, q_temperature, q_sampled,
                    index, block_max, block_sum, block_argmax, num_blocks, overlaps, num_overlaps,
                    WIDTH, DEPTHS, BLOCKS, HAS_Q, SUMS, MODE,
                )  # fmt: skip
                scale = element(reach, depth)
            total = _overlap(
                block, scale, logits + depth * depth_stride, ids, num_ids,
                temperature,
                q_logits + depth * q_depth_stride, q_log_sum + depth, q_temperature,
                block_max + (row * WIDTH + depth) * num_blocks,
                block_sum + (row * WIDTH + depth) * num_blocks, num_blocks, BLOCKS, SIZE,
            )  # fmt: skip
            tl.store(overlaps + (row * (WIDTH - 1) + depth) * num_overlaps + block, total)


@triton.jit
def finalize(
    num_drafts, temperatures, emitted, probability, race_values, race_tokens, num_races, overlaps,
    num_overlaps, WIDTH: tl.constexpr, DEPTHS: tl.constexpr, RACES: tl.constexpr,
    SUMS: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Write a row's token, and Σ min(p, q) of each draft unless SUMS is 0; grid (B,)."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        part = tl.arange(0, RACES)
        at = row * 2 * num_races + part
        value, first = max_index(tl.load(race_values + at, mask=part < num_races, other=0.0))
        token = element(tl.load(race_tokens + at, mask=part < num_races, other=0), first)
        if value <= 0:
            # Where p = q up to rounding the residual is empty; p itself is then exact.
            at += num_races
            value, first = max_index(tl.load(race_values + at, mask=part < num_races, other=0.0))
            token = element(tl.load(race_tokens + at, mask=part < num_races, other=0), first)
        tl.store(emitted + row, token)
        if SUMS > 0:
            depth, block = tl.arange(0, DEPTHS), tl.arange(0, SUMS)
            count = tl.minimum(tl.load(num_drafts + row), WIDTH - 1)
            is_draft = depth < count
            at = (row * (WIDTH - 1) + depth)[:, None] * num_overlaps + block[None, :]
            mask = is_draft[:, None] & (block < num_overlaps)[None, :]
            total = tl.sum(tl.load(overlaps + at, mask=mask, other=0.0), 1)
            tl.store(probability + row * (WIDTH - 1) + depth, total, mask=is_draft)
