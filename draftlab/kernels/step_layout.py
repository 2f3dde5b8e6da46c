"""What surrounds a decode step: the rows read from the slots before it, written back after it.

`lay_out` gathers what the rows of a step need and says where their tokens go; `advance` books what
the verifier decided; `keep` stores the next drafts. In torch operations each would be a dozen
kernels of a few rows, which cost a launch each and compute nothing to speak of; on a GPU each is
one kernel (`step_layout_triton.py`). The eager references below define them and run on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.sampling_types import SamplingMetadata, VerifyResult


@dataclass(eq=False)
class SlotBuffers:
    """What the device knows of R requests, and of a dummy that fills up batches: static buffers.

    Attributes:
        length: int64 [R + 1], tokens known (prompt and answer); the newest has no key cached yet.
            0 for an empty slot, whose rows compute nothing that anyone reads.
        newest: int64 [R + 1], the last known token.
        drafts: int64 [R + 1, K], proposed to follow it.
        block_table: int32 [R + 1, N], the blocks it owns; 0 where it owns none.
        keys: sampling parameters and noise keys, each [R + 1].
        sampling: draft temperature float32 [R + 1] and bool [R + 1], which rows sample their
            drafts; None where none can.
        draft_logits: [R + 1, K, W], what sampled drafts were drawn from; None without.
        draft_log_sum: float32 [R + 1, K], logsumexp of those over the draft temperature.
    """

    length: Tensor
    newest: Tensor
    drafts: Tensor
    block_table: Tensor
    keys: SamplingMetadata
    sampling: tuple[Tensor, Tensor] | None = None
    draft_logits: Tensor | None = None
    draft_log_sum: Tensor | None = None


@dataclass(frozen=True)
class StepLayout:
    """The rows of a step.

    Attributes:
        index: int64 [B], their slots.
        length: int64 [B], tokens known of each.
        tokens: int64 [B, K + 1], its newest token and its drafts.
        positions: int64 [B, K + 1] of these; −1 for drafts beyond the limit and empty slots.
        slots: int64 [B, K + 1], where their keys go in the pool; −1 nowhere.
        num_drafts: int64 [B], how many drafts are real.
        block_table: int32 [B, N].
        keys: each [B].
        sampling: each [B], or None; see `SlotBuffers`.
    """

    index: Tensor
    length: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    num_drafts: Tensor
    block_table: Tensor
    keys: SamplingMetadata
    sampling: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Outcome:
    """What a step has established.

    Attributes:
        tokens: int64 [B, K + 1], the accepted drafts, the emitted token, then what is left of the
            drafts.
        positions: int64 [B, K + 1] of the accepted tokens' predecessors: the pairs (x_{p+1}, g_p)
            that are true; −1 behind them and in empty slots.
        counts: int64 [B], tokens emitted: accepted + 1.
        packed: int32 [B, 2K + 3], for one copy to the host; see `pack`.
    """

    tokens: Tensor
    positions: Tensor
    counts: Tensor
    packed: Tensor


def lay_out(slots: SlotBuffers, index: Tensor, *, max_length: int, block_size: int) -> StepLayout:
    """Reads the rows of a step from their slots.

    Draft d is fed at position length + d. The token after the last draft must fit as well: the
    limit vLLM's scheduler keeps (docs/benchmarks.md).

    Args:
        slots: not changed.
        index: int64 [B], slot numbers.
        max_length: positions a row may take.
        block_size: positions in a block of the pool.
    """
    if index.is_cuda:
        from draftlab.kernels.step_layout_triton import lay_out_triton as operation
    else:
        operation = lay_out_reference
    return operation(slots, index, max_length=max_length, block_size=block_size)


def advance(slots: SlotBuffers, layout: StepLayout, verdict: VerifyResult) -> Outcome:
    """Books a verdict: `slots.length` and `slots.newest` of the rows are written in place."""
    if layout.index.is_cuda:
        from draftlab.kernels.step_layout_triton import advance_triton as operation
    else:
        operation = advance_reference
    return operation(slots, layout, verdict)


def keep(
    slots: SlotBuffers,
    index: Tensor,
    drafts: Tensor,
    logits: Tensor | None = None,
    log_sum: Tensor | None = None,
) -> None:
    """Stores the next drafts of the slots `index`, and what they were drawn from.

    Args:
        slots: `drafts`, `draft_logits` and `draft_log_sum` are written in place.
        index: int64 [B].
        drafts: int64 [B, K], any strides.
        logits: [B, K, W], any strides with a last one of 1; None where all drafts are argmaxes.
        log_sum: float32 [B, K], any strides; with `logits`.
    """
    if index.is_cuda:
        from draftlab.kernels.step_layout_triton import keep_triton as operation
    else:
        operation = keep_reference
    operation(slots, index, drafts, logits, log_sum)


def pack(tokens: Tensor, accepted: Tensor, num_drafts: Tensor, chance: Tensor) -> Tensor:
    """int32 [B, 2K + 3]: K + 1 tokens, accepted, drafts verified, the bits of K chances (float32).

    Args:
        tokens: int64 [B, K + 1], of a vocabulary below 2³¹.
        accepted, num_drafts: int64 [B].
        chance: float32 [B, K].
    """
    counts = torch.stack([accepted, num_drafts], 1)
    bits = chance.float().contiguous().view(torch.int32)
    return torch.cat([tokens.int(), counts.int(), bits], 1)


def lay_out_reference(
    slots: SlotBuffers, index: Tensor, *, max_length: int, block_size: int
) -> StepLayout:
    """`lay_out`, eager."""
    length, drafts = slots.length[index], slots.drafts[index]
    k = drafts.shape[1]
    depth = torch.arange(k + 1, device=index.device)
    live = length > 0
    num_drafts = (max_length - 1 - length).clamp(0, k).where(live, 0)
    real = (depth <= num_drafts[:, None]) & live[:, None]
    positions = (length[:, None] - 1 + depth).where(real, -1)
    table = slots.block_table[index]
    sampling = slots.sampling
    return StepLayout(
        index,
        length,
        torch.cat([slots.newest[index, None], drafts], 1),
        positions,
        slot_mapping(table, positions, block_size),
        num_drafts,
        table,
        slots.keys[index],
        None if sampling is None else (sampling[0][index], sampling[1][index]),
    )


def advance_reference(slots: SlotBuffers, layout: StepLayout, verdict: VerifyResult) -> Outcome:
    """`advance`, eager."""
    length, accepted, drafts = layout.length, verdict.accepted, layout.tokens[:, 1:]
    live = length > 0
    # drafts shifted into place, the emitted token behind the accepted ones
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
    tokens = tokens.scatter(1, accepted[:, None], verdict.emitted[:, None])
    depth = torch.arange(tokens.shape[1], device=tokens.device)
    kept = (depth <= accepted[:, None]) & live[:, None]
    slots.length[layout.index] = (length + accepted + 1).where(live, 0)
    slots.newest[layout.index] = verdict.emitted
    return Outcome(
        tokens,
        layout.positions.where(kept, -1),
        accepted + 1,
        pack(tokens, accepted, layout.num_drafts, verdict.probability),
    )


def keep_reference(
    slots: SlotBuffers,
    index: Tensor,
    drafts: Tensor,
    logits: Tensor | None = None,
    log_sum: Tensor | None = None,
) -> None:
    """`keep`, eager."""
    slots.drafts[index] = drafts
    if logits is not None and log_sum is not None:
        slots.draft_logits[index] = logits
        slots.draft_log_sum[index] = log_sum
