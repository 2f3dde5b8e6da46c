"""Prefill: prompts in chunks through target and drafter, first tokens, what first drafts need.

Equal prompts are computed once: what differs between them begins with their first tokens, so the
others take a copy of the keys. Sampling a prompt many times then costs little more than decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from draftlab.engine.drafter import Observed
from draftlab.engine.sequence import Job
from draftlab.engine.step import Step, StepResult
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.step_layout import pack
from draftlab.kernels.verify import sample_first
from draftlab.target_model.model import States

Tokens = tuple[int, ...]


@torch.inference_mode()
def prefill(
    step: Step, jobs: Sequence[Job], index: Tensor, chunk_tokens: int
) -> tuple[StepResult, Observed | None]:
    """Runs the jobs' tokens and emits their first token.

    A job that was evicted is fed everything but its newest token, which is known.

    Args:
        step: of the engine; its slots are written.
        jobs: with slots and blocks.
        index: their slots, int64 [B].
        chunk_tokens: tokens in a forward pass of all rows, padding included.

    Returns:
        The first tokens, with num_drafts = −1, and what the drafter is to propose from, so that
        tokens are on their way before they have drafts (None: there is no drafter).
    """
    slots, drafter = step.slots, step.drafter
    fed = [tuple(job.tokens[:-1] if job.resumed else job.tokens) for job in jobs]
    prompts = list(dict.fromkeys(fed))
    place = {tokens: number for number, tokens in enumerate(prompts)}
    of = [place[tokens] for tokens in fed]
    computing = [of.index(number) for number in range(len(prompts))]  # the first row of each
    last = _run(step, index[slots.to_device(computing, torch.int64)], prompts, chunk_tokens)
    _share(step, jobs, [computing[number] for number in of], list(map(len, fed)))

    own = slots.to_device(of, torch.int64)
    lengths = slots.to_device(list(map(len, fed)), torch.int64)
    resumed = slots.to_device([job.resumed for job in jobs], torch.bool)
    known = slots.to_device([job.tokens[-1] for job in jobs], torch.int64)
    keys, limited = slots.keys[index], any(job.limited for job in jobs)
    sampled = sample_first(step.target.logits(last.last[own]), lengths, keys, limited=limited)
    newest = known.where(resumed, sampled)
    slots.length[index], slots.newest[index] = lengths + 1, newest
    none = torch.zeros_like(lengths)
    result = StepResult(pack(newest[:, None], none, none - 1, newest.new_empty(len(jobs), 0)))
    if drafter is None:
        return result, None
    # The last pair has the newest token, each job's own.
    pair = newest[:, None], last.features[own][:, None], lengths[:, None] - 1
    return result, Observed(*pair, torch.ones_like(lengths), slots.block_table[index], keys)


def _run(step: Step, index: Tensor, prompts: Sequence[Tokens], size: int) -> States:
    """Runs prompts through the target, and all their pairs but the last through the drafter.

    Args:
        index: the prompts' slots, int64 [R].
        prompts: R prompts.
        size: tokens in a forward pass of all rows, padding included.

    Returns:
        The states [R, …] of their last positions.
    """
    slots, drafter = step.slots, step.drafter
    lengths = slots.to_device(list(map(len, prompts)), torch.int64)
    longest = max(map(len, prompts))
    table, keys = slots.block_table[index], slots.keys[index]
    width = max(size // len(prompts), 16)
    kept: States | None = None
    for start in range(0, longest, width):
        end = min(start + width, longest)
        columns = torch.arange(start, end, device=index.device).expand(len(prompts), -1)
        positions = columns.where(columns < lengths[:, None], -1)
        states = step.decoder.states(
            _columns(slots.to_device, prompts, start, end),
            step.boundaries,
            positions=positions,
            cache=step.cache.at(
                table, positions, slot_mapping(table, positions, step.cache.block_size)
            ),
        )
        kept = _keep_last(states, (lengths - 1)[:, None] - start, kept)
        if drafter is not None and start < longest - 1:
            paired = columns.where(columns < lengths[:, None] - 1, -1)
            observed = Observed(
                _columns(slots.to_device, prompts, start + 1, end + 1),
                states.features,
                paired,
                (paired >= 0).sum(1).clamp(min=1),
                table,
                keys,
            )
            drafter.observe(observed.first_columns(min(end, longest - 1) - start))
    assert kept is not None  # no prompt is empty
    return kept


def _keep_last(states: States, at: Tensor, kept: States | None) -> States:
    """`kept`, with the states of columns `at` [R, 1] where these lie in the chunk `states`."""
    inside = (at >= 0) & (at < states.last.shape[1])
    column = at.clamp(0, states.last.shape[1] - 1)[..., None]

    def pick(chunk: Tensor, before: Tensor | None) -> Tensor:
        found = chunk.gather(1, column.expand(-1, 1, chunk.shape[-1]))[:, 0]
        return found if before is None else found.where(inside, before)

    return States(
        pick(states.features, kept and kept.features), pick(states.last, kept and kept.last)
    )


def _share(step: Step, jobs: Sequence[Job], of: Sequence[int], lengths: Sequence[int]) -> None:
    """Copies the blocks of each job's prompt from the row `of` that computed it."""
    pairs = [
        pair
        for row, (job, leader, length) in enumerate(zip(jobs, of, lengths, strict=True))
        if leader != row
        for pair in zip(
            jobs[leader].blocks[: -(-length // step.cache.block_size)], job.blocks, strict=False
        )
    ]
    if not pairs:
        return
    source, to = (step.slots.to_device(blocks, torch.int64) for blocks in zip(*pairs, strict=True))
    own = chain.from_iterable(step.drafter.pools if step.drafter else ())
    for pool in (*step.cache.key_pool, *step.cache.value_pool, *own):
        pool.index_copy_(0, to, pool.index_select(0, source))


def _columns(to_device, rows: Sequence[Tokens], start: int, end: int) -> Tensor:
    """Columns start … end − 1 of ragged rows, int64 [R, end − start], filled with 0."""
    cut = [list(row[start:end]) for row in rows]
    return to_device([row + [0] * (end - start - len(row)) for row in cut], torch.int64)
