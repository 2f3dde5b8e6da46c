"""The bookkeeping of a decode step on the device: gather its batch, commit its result.

    gather_batch  reads the rows of a step from the slots and computes where their keys go
    commit        writes the verifier's result to the slots
    store_drafts  writes the next drafts to the slots

In torch operations each would be a dozen kernels of a few rows, whose launches cost more than their
work. On a GPU each is one kernel (`step_layout/triton.py`).
"""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.step_layout.types import SlotBuffers, StepLayout, StepOutput


@triton_operator("step_layout.triton", attrgetter("length"))
def gather_batch(
    slots: SlotBuffers,
    index: Tensor,
    *,
    max_length: int,
    block_size: int,
) -> StepLayout:
    """Return the input batch of a step.

    Draft d is fed at position length + d. The token after the last draft must fit as well, as in
    vLLM's scheduler.

    Args:
        slots: not changed.
        index: int64 [B], slot numbers.
        max_length: positions a row may take.
        block_size: positions in a block of the pool.
    """
    length, drafts = slots.length[index], slots.drafts[index]
    k = drafts.shape[1]
    depth = torch.arange(k + 1, device=index.device)
    active = length > 0
    room = torch.minimum(max_length - 1 - length, slots.stored[index])
    num_drafts = room.clamp(0, k).where(active, 0)
    is_real = (depth <= num_drafts[:, None]) & active[:, None]
    positions = (length[:, None] - 1 + depth).where(is_real, -1)
    table = slots.block_table[index]
    return StepLayout(
        index,
        length,
        torch.cat([slots.newest[index, None], drafts], 1),
        positions,
        slot_mapping(table, positions, block_size),
        num_drafts,
        table,
        slots.keys[index],
    )


@triton_operator("step_layout.triton", attrgetter("length"))
def commit(slots: SlotBuffers, layout: StepLayout, result: VerifyResult) -> StepOutput:
    """Write a verification's result to `slots.length` and `slots.newest` of the layout's rows.

    No drafts are stored afterwards. If the slots have the confidence of drafts, so have the
    results: NaN behind the drafts that were stored, and in rows without a request.
    """
    length, accepted, drafts = layout.length, result.accepted, layout.tokens[:, 1:]
    active = length > 0
    # The drafts in their places, with the emitted token behind the accepted ones.
    tokens = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
    tokens = tokens.scatter(1, accepted[:, None], result.emitted[:, None])
    depth = torch.arange(tokens.shape[1], device=tokens.device)
    is_verified = (depth <= accepted[:, None]) & active[:, None]
    slots.length[layout.index] = (length + accepted + 1).where(active, 0)
    slots.newest[layout.index] = result.emitted
    stated = None
    if slots.confidence is not None:
        # Dummies share a slot, which the first of them empties.
        stored = (depth[:-1] < slots.stored[layout.index, None]) & active[:, None]
        stated = slots.confidence[layout.index, : drafts.shape[1]].where(stored, torch.nan)
    slots.stored[layout.index] = 0
    return StepOutput(
        tokens,
        layout.positions.where(is_verified, -1),
        accepted + 1,
        pack_results(tokens, accepted, layout.num_drafts, result.probability, stated),
    )


@triton_operator("step_layout.triton", attrgetter("length"))
def store_drafts(
    slots: SlotBuffers,
    index: Tensor,
    drafts: Tensor,
    logits: Tensor | None = None,
    log_sum: Tensor | None = None,
    confidence: Tensor | None = None,
) -> None:
    """Write the next drafts of the slots `index`, and what they were drawn from.

    Args:
        slots: `stored`, `drafts`, `draft_logits`, `draft_log_sum` and `confidence` are written in
            place.
        index: int64 [B].
        drafts: int64 [B, k], any strides; k may be smaller than the slots' K.
        logits: [B, k, W], any strides with a last one of 1; None where all drafts are argmaxes.
        log_sum: float32 [B, k], any strides; with `logits`.
        confidence: float32 [B, k], any strides; None: none is stated.
    """
    k = drafts.shape[1]
    slots.stored[index] = k
    slots.drafts[index, :k] = drafts
    if logits is not None and log_sum is not None:
        slots.draft_logits[index, :k] = logits
        slots.draft_log_sum[index, :k] = log_sum
    if confidence is not None:
        slots.confidence[index, :k] = confidence


def pack_results(
    tokens: Tensor,
    accepted: Tensor,
    num_drafts: Tensor,
    probability: Tensor,
    confidence: Tensor | None = None,
) -> Tensor:
    """Return int32 [B, 3K + 3], or [B, 2K + 3] without confidence.

    A row has K + 1 tokens, accepted, drafts verified, and the bits of K probabilities and of K
    logits of confidence.

    Args:
        tokens: int64 [B, K + 1], of a vocabulary below 2³¹.
        accepted, num_drafts: int64 [B].
        probability, confidence: float32 [B, K].
    """
    counts = torch.stack([accepted, num_drafts], 1)
    floats = [probability.float()] if confidence is None else [probability.float(), confidence]
    bits = torch.cat(floats, 1).contiguous().view(torch.int32)
    return torch.cat([tokens.int(), counts.int(), bits], 1)


def unpack_results(packed: Tensor, *, confidence: bool = False) -> tuple[Tensor, ...]:
    """Return tokens, accepted, num_drafts, probability and confidence of `pack_results`, as views.

    Of row b the first accepted[b] + 1 tokens are emitted.

    Args:
        confidence: whether it was packed; if not, [B, 0] is returned for it.
    """
    k = (packed.shape[1] - 3) // (3 if confidence else 2)
    tokens, accepted, num_drafts, bits = packed.split([k + 1, 1, 1, packed.shape[1] - k - 3], 1)
    floats = bits.view(torch.float32)
    return tokens, accepted[:, 0], num_drafts[:, 0], floats[:, :k], floats[:, k:]
