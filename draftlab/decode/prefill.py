"""Prefill: prompts in chunks through target and drafter, first tokens, first drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftlab.decode.drafter import Observed
from draftlab.decode.job import Job
from draftlab.decode.step import Step, StepResult
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.step_layout import pack
from draftlab.kernels.verify import sample_first


@torch.inference_mode()
def prefill(step: Step, jobs: Sequence[Job], index: Tensor, chunk_tokens: int) -> StepResult:
    """Runs the jobs' tokens, emits their first token and makes their first drafts.

    A job that was evicted is fed everything but its newest token, which is known.

    Args:
        step: of the engine; its slots are written.
        jobs: with slots and blocks.
        index: their slots, int64 [B].
        chunk_tokens: tokens in a forward pass of all rows, padding included.

    Returns:
        The first tokens, with num_drafts = −1.
    """
    slots, target, drafter = step.slots, step.target, step.drafter
    fed = [job.tokens[:-1] if job.resumed else job.tokens for job in jobs]
    lengths = slots.to_device([len(tokens) for tokens in fed], torch.int64)
    resumed = slots.to_device([job.resumed for job in jobs], torch.bool)
    newest = slots.to_device([job.tokens[-1] for job in jobs], torch.int64)
    table, keys = slots.block_table[index], slots.keys[index]
    limited = any(job.limited for job in jobs)
    width = max(chunk_tokens // len(jobs), 16)
    carried: Tensor | None = None
    for start in range(0, max(map(len, fed)), width):
        end = min(start + width, max(map(len, fed)))
        tokens = _columns(slots.to_device, fed, start, end)
        positions = torch.arange(start, end, device=target.device).expand(len(jobs), -1)
        positions = positions.where(positions < lengths[:, None], -1)
        states = target.states(
            tokens,
            step.boundaries,
            positions=positions,
            cache=step.cache.at(
                table, positions, slot_mapping(table, positions, step.cache.block_size)
            ),
        )
        ends = (lengths > start) & (lengths <= end)
        last = (lengths - 1 - start).clamp(0, end - start - 1)
        if any(start < len(t) <= end and not job.resumed for t, job in zip(fed, jobs, strict=True)):
            state = states.last.gather(1, last[:, None, None].expand(-1, 1, states.last.shape[-1]))[
                :, 0
            ]
            sampled = sample_first(target.logits(state), lengths, keys, limited=limited)
            newest = sampled.where(ends & ~resumed, newest)
        if drafter is not None:
            # Pair (x_{p+1}, g_p): the prompt shifted by one, at its end the newest token.
            shifted = _columns(slots.to_device, fed, start + 1, end + 1)
            behind = (positions == lengths[:, None] - 1) & (positions >= 0)
            counts = (positions >= 0).sum(1)
            seen = drafter.observe(
                Observed(
                    newest[:, None].where(behind, shifted),
                    states.features,
                    positions,
                    counts.clamp(min=1),
                    table,
                    keys,
                )
            )
            carried = seen if carried is None else seen.where((counts > 0)[:, None], carried)
    slots.length[index], slots.newest[index] = lengths + 1, newest
    if drafter is not None and carried is not None:
        step.keep(index, drafter.draft(carried, lengths - 1, table, keys))
    none = torch.zeros_like(lengths)
    return StepResult(pack(newest[:, None], none, none - 1, newest.new_empty(len(jobs), 0)))


def _columns(to_device, rows: Sequence[Sequence[int]], start: int, end: int) -> Tensor:
    """Columns start … end − 1 of ragged rows, int64 [B, end − start], filled with 0."""
    cut = [list(row[start:end]) for row in rows]
    return to_device([row + [0] * (end - start - len(row)) for row in cut], torch.int64)
