"""Triton kernels of `step_layout/`; every entry is written by exactly one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftlab.kernels.launching import launch_options
from draftlab.kernels.sampling.types import SamplingMetadata
from draftlab.kernels.step_layout.types import StepLayout, StepOutput

_TABLE_TILE = 256  # entries of a block table copied at once
_LOGITS_TILE = 8192  # draft logits one program copies


@triton.jit
def slot_of(table, table_width, position, block_size):
    """Return `slot_mapping` of int64 positions in one row of a block table, int64."""
    inside = (position >= 0) & (position < table_width * block_size)
    block = tl.load(table + position // block_size, mask=inside, other=0).to(tl.int64)
    return tl.where(inside & (block > 0), block * block_size + position % block_size, -1)


@triton.jit
def _copy(source, slot, target, row):
    """Copy one element."""
    tl.store(target + row, tl.load(source + slot))


@triton.jit
def gather_batch_kernel(
    index, length, newest, stored, drafts, draft_stride, block_table, temperature, top_k, top_p,
    seed, prompt, length_out, tokens_out, positions_out, slots_out, num_drafts_out, table_out,
    temperature_out, top_k_out, top_p_out, seed_out, prompt_out,
    table_width, block_size, max_length,
    WIDTH: tl.constexpr, DEPTHS: tl.constexpr, TILE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Gather one row; grid (B,), WIDTH = K + 1."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(index + row)
    known_length = tl.load(length + slot)
    active = known_length > 0
    room = tl.minimum(max_length - 1 - known_length, tl.load(stored + slot))
    count = tl.minimum(tl.maximum(room, 0), WIDTH - 1)
    count = tl.where(active, count, 0)
    depth = tl.arange(0, DEPTHS)
    inside = depth < WIDTH
    draft = drafts + slot * draft_stride + depth - 1
    draft = tl.load(draft, mask=inside & (depth > 0), other=0)
    position = tl.where(active & (depth <= count), known_length - 1 + depth, -1)
    table = block_table + slot * table_width
    cache_slot = slot_of(table, table_width, position, block_size)
    out = row * WIDTH + depth
    tl.store(tokens_out + out, tl.where(depth == 0, tl.load(newest + slot), draft), mask=inside)
    tl.store(positions_out + out, position, mask=inside)
    tl.store(slots_out + out, cache_slot, mask=inside)
    tl.store(length_out + row, known_length)
    tl.store(num_drafts_out + row, count)
    _copy(temperature, slot, temperature_out, row)
    _copy(top_k, slot, top_k_out, row)
    _copy(top_p, slot, top_p_out, row)
    _copy(seed, slot, seed_out, row)
    _copy(prompt, slot, prompt_out, row)
    for start in range(0, table_width, TILE):
        at = start + tl.arange(0, TILE)
        block = tl.load(table + at, mask=at < table_width, other=0)
        tl.store(table_out + row * table_width + at, block, mask=at < table_width)


@triton.jit
def commit_kernel(
    index, length, tokens, positions, num_drafts, accepted, emitted, probability,
    confidence, confidence_stride, slot_length, slot_newest, slot_stored, tokens_out,
    positions_out, counts_out, results_out, results_stride,
    WIDTH: tl.constexpr, DEPTHS: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Commit one row; grid (B,), WIDTH = K + 1."""
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot, known_length = tl.load(index + row), tl.load(length + row)
    num_accepted, token = tl.load(accepted + row), tl.load(emitted + row)
    active = known_length > 0
    tl.store(slot_length + slot, tl.where(active, known_length + num_accepted + 1, 0))
    tl.store(slot_newest + slot, token)
    # Dummies share a slot, which the first of them empties.
    num_stored = tl.where(active, tl.load(slot_stored + slot), 0)
    tl.store(slot_stored + slot, tl.zeros_like(slot))
    tl.store(counts_out + row, num_accepted + 1)
    depth = tl.arange(0, DEPTHS)
    inside, drafted = depth < WIDTH, depth < WIDTH - 1
    at = row * WIDTH + depth
    draft = tl.load(tokens + at + 1, mask=drafted, other=0)
    token_out = tl.where(depth == num_accepted, token, draft)
    position = tl.load(positions + at, mask=inside, other=-1)
    value = tl.load(probability + row * (WIDTH - 1) + depth, mask=drafted, other=0.0)
    tl.store(tokens_out + at, token_out, mask=inside)
    position = tl.where(active & (depth <= num_accepted), position, -1)
    tl.store(positions_out + at, position, mask=inside)
    results = results_out + row * results_stride
    tl.store(results + depth, token_out.to(tl.int32), mask=inside)
    tl.store(results + WIDTH, num_accepted.to(tl.int32))
    tl.store(results + WIDTH + 1, tl.load(num_drafts + row).to(tl.int32))
    bits = value.to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(results + WIDTH + 2 + depth, bits, mask=drafted)
    if confidence is not None:
        value = tl.load(confidence + slot * confidence_stride + depth, mask=drafted, other=0.0)
        value = tl.where(depth < num_stored, value, float("nan"))
        bits = value.to(tl.int32, bitcast=True)
        tl.store(results + 2 * WIDTH + 1 + depth, bits, mask=drafted)


@triton.jit
def store_drafts_kernel(
    index, drafts, draft_row, draft_depth, log_sum, sum_row, sum_depth, confidence,
    confidence_row, confidence_depth, logits, logit_row, logit_depth, vocab, blocks, slot_stored,
    slot_drafts, slot_log_sum, slot_confidence, slot_logits, slot_stride,
    K: tl.constexpr, DEPTHS: tl.constexpr, TILE: tl.constexpr, GDC: tl.constexpr,
):  # fmt: skip
    """Copy a tile of a row's draft logits; the first program of a row also writes its drafts.

    Grid (B, K · blocks), or (B, 1) without logits. slot_stride: drafts that a slot holds.
    """
    if GDC:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(index + row)
    if program == 0:
        depth = tl.arange(0, DEPTHS)
        inside = depth < K
        draft = tl.load(drafts + row * draft_row + depth * draft_depth, mask=inside, other=0)
        out = slot * slot_stride + depth
        tl.store(slot_drafts + out, draft, mask=inside)
        tl.store(slot_stored + slot, tl.zeros_like(slot) + K)
        if logits is not None:
            total = tl.load(log_sum + row * sum_row + depth * sum_depth, mask=inside, other=0.0)
            tl.store(slot_log_sum + out, total, mask=inside)
        if confidence is not None:
            score = confidence + row * confidence_row + depth * confidence_depth
            tl.store(slot_confidence + out, tl.load(score, mask=inside, other=0.0), mask=inside)
    if logits is not None:
        depth = program // blocks
        at = (program - depth * blocks) * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * logit_row + depth * logit_depth + at, mask=at < vocab)
        tl.store(slot_logits + (slot * slot_stride + depth) * vocab + at, x, mask=at < vocab)


def gather_batch(slots, index, *, max_length, block_size) -> StepLayout:
    """Launch `step_layout.gather_batch`."""
    rows, width = len(index), slots.drafts.shape[1] + 1
    keys = slots.keys
    sources = keys.temperature, keys.top_k, keys.top_p, keys.seed, keys.prompt
    gathered = [x.new_empty(rows) for x in sources]
    layout = StepLayout(
        index,
        index.new_empty(rows),
        *index.new_empty(3, rows, width),
        index.new_empty(rows),
        slots.block_table.new_empty(rows, slots.block_table.shape[1]),
        SamplingMetadata(*gathered),
    )
    gather_batch_kernel[(rows,)](
        index,
        slots.length,
        slots.newest,
        slots.stored,
        slots.drafts,
        slots.drafts.stride(0),
        slots.block_table,
        *sources,
        layout.length,
        layout.tokens,
        layout.positions,
        layout.slots,
        layout.num_drafts,
        layout.block_table,
        *gathered,
        slots.block_table.shape[1],
        block_size,
        max_length,
        WIDTH=width,
        DEPTHS=triton.next_power_of_2(width),
        TILE=_TABLE_TILE,
        num_warps=1,
        **launch_options(index.device),
    )
    return layout


def commit(slots, layout, result) -> StepOutput:
    """Launch `step_layout.commit`."""
    tokens = layout.tokens
    rows, width = tokens.shape
    stated = slots.confidence
    results = 2 * width + 1 + (0 if stated is None else width - 1)
    packed = tokens.new_empty(rows, results, dtype=torch.int32)
    outputs = *tokens.new_empty(2, rows, width), tokens.new_empty(rows), packed
    commit_kernel[(rows,)](
        layout.index,
        layout.length,
        tokens,
        layout.positions,
        layout.num_drafts,
        *(x.contiguous() for x in (result.accepted, result.emitted, result.probability)),
        stated,
        0 if stated is None else stated.stride(0),
        slots.length,
        slots.newest,
        slots.stored,
        *outputs,
        results,
        WIDTH=width,
        DEPTHS=triton.next_power_of_2(width),
        num_warps=1,
        **launch_options(tokens.device),
    )
    return StepOutput(*outputs)


def store_drafts(slots, index, drafts, logits=None, log_sum=None, confidence=None) -> None:
    """Launch `step_layout.store_drafts`."""
    rows, k = drafts.shape
    vocab = blocks = 0
    if logits is not None:
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        vocab = logits.shape[-1]
        blocks = triton.cdiv(vocab, _LOGITS_TILE)
    store_drafts_kernel[(rows, max(1, k * blocks))](
        index,
        drafts,
        *drafts.stride(),
        log_sum,
        *((0, 0) if log_sum is None else log_sum.stride()),
        confidence,
        *((0, 0) if confidence is None else confidence.stride()),
        logits,
        *((0, 0) if logits is None else logits.stride()[:2]),
        vocab,
        blocks,
        slots.stored,
        slots.drafts,
        slots.draft_log_sum,
        slots.confidence,
        slots.draft_logits,
        slots.drafts.stride(0),
        K=k,
        DEPTHS=triton.next_power_of_2(k),
        TILE=_LOGITS_TILE,
        num_warps=8,
        **launch_options(index.device),
    )
