"""The objective of block-parallel heads: blocks at sampled anchors (methods §7).

The anchor at t has the block of positions t + 1, t + 2, …, whose slot 0 holds x_{t+1}. Step k of
`StepRows` is the draft of slot k (fill-in layout: k + 1): it predicts x_{t+2+k} with the teacher
p_{t+1+k}. A slot attends to the context keys of positions ≤ t of its conversation and to the keys
of its block. All slots of an anchor are computed, since the others read their keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftlab.heads.block import BlockHead
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import StepOutput, row_starts

MOST_QUERIES = 64
"""Queries of a kv head that the attention kernel takes together: a tile of its backward pass. With
128 and heads of 256 channels, or with 256, a program needs more shared memory than an H200 has."""


def block_outputs(head: BlockHead, batch: Batch) -> Iterator[StepOutput]:
    """Yield the outputs of each step."""
    steps = [rows for rows in batch.steps if rows.index.shape[1]]
    if not steps:
        return
    first, config = steps[0], head.config
    index, starts = first.index, row_starts(document_starts(batch.documents), first)
    context = head.project_features(batch.features.to(head.fc.weight.dtype))
    context_angles = head.rope.angles(batch.positions)
    # Padding rows may name the last position, which has no next token.
    newest = batch.tokens.gather(1, (index + 1).clamp(max=batch.tokens.shape[1] - 1))
    slots = torch.arange(config.block_size, device=index.device)
    angles = head.rope.angles(batch.positions.gather(1, index)[..., None] + 1 + slots)
    slot_rows = slot_row_indices(index, config.block_size)
    hidden = head.embed(head.block_tokens(newest, config.block_size)).to(context.dtype)
    for layer in head.layers:
        attention, (x, finish) = layer.self_attn, layer.begin(hidden)
        keys, values = (t.unbind(2) for t in attention.key_value(x, angles))
        attended = block_attention(
            attention.query(x, angles),
            attention.key_value(context, context_angles),
            StepKeyValues(keys, values, slot_rows),
            index,
            starts,
            window=layer.window,
            is_causal=config.is_causal,
        )
        hidden = finish(attended)
    flat = hidden.flatten(0, 1)[first.valid_rows]
    for slot, (rows, anchors) in enumerate(
        zip(steps, step_anchors(steps), strict=True), config.first_slot
    ):
        yield StepOutput(flat[anchors, slot], rows.teacher_index)


def step_anchors(steps: Sequence[StepRows]) -> list[Tensor]:
    """Return each step's anchors, int64 [n_k], among the first step's valid ones."""
    anchors = [torch.arange(len(steps[0].valid_rows), device=steps[0].index.device)]
    for rows in steps[1:]:
        anchors.append(anchors[-1][rows.origin])
    return anchors


def slot_row_indices(index: Tensor, num_slots: int) -> Tensor:
    """Return `StepKeyValues.rows` of the slots of anchors, whose last context position is `index`
    [B, A]: each slot has a key for each anchor.
    """
    rows = torch.arange(index.numel(), device=index.device).view(index.shape)
    return rows.repeat(num_slots, 1, 1)


def block_attention(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    block: StepKeyValues,
    index: Tensor,
    starts: Tensor,
    *,
    window: int | None,
    is_causal: bool,
) -> Tensor:
    """Return the attention [B, A, slots, heads, head_dim] of blocks to contexts and to themselves.

    Args:
        query: [B, A, slots, heads, head_dim], rotated.
        context: keys and values of all positions, [B, S, kv heads, head_dim].
        block: those of each slot, [B, A, kv heads, head_dim], with `slot_row_indices`.
        index: int64 [B, A], the last context position of each anchor.
        starts: int64 [B, A], its first; beyond `index` for padding.
        window, is_causal: as in `BlockConfig`.
    """
    num_slots, num_kv_heads = query.shape[2], context[0].shape[2]

    def attend(part: Tensor, seen: int, starts: Tensor) -> Tensor:
        """Return the attention of some slots, which see as many slots of their block."""
        # They see the same keys, so they are further heads of their anchor's row.
        grouped = part.unflatten(3, (num_kv_heads, -1)).permute(0, 1, 3, 4, 2, 5)
        own = StepKeyValues(block.keys[:seen], block.values[:seen], block.rows[:seen])
        attended = ttt_attention(grouped.flatten(2, 4), *context, index, starts, own)
        return attended.view(grouped.shape).permute(0, 1, 4, 2, 3, 5).flatten(3, 4)

    if is_causal or window is not None:  # each slot sees other keys
        parts = []
        for slot, part in enumerate(query.split(1, 2)):
            # The slot is slot + 1 positions behind the last context position.
            first = starts if window is None else starts.maximum(index + slot + 2 - window)
            parts.append(attend(part, slot + 1 if is_causal else num_slots, first))
    else:
        queries = num_slots * query.shape[3] // num_kv_heads
        if queries <= MOST_QUERIES:
            return attend(query, num_slots, starts)
        at_once = query.chunk(-(-queries // MOST_QUERIES), 2)
        parts = [attend(part, num_slots, starts) for part in at_once]
    return torch.cat(parts, 2)


def block_weights(gamma: float, counts: Sequence[int]) -> list[float]:
    """Return γ^k · N_0 / Σ_j γ^j N_j for each step k.

    Divided by N_0, the loss is then a weighted mean over all slots that carry loss.
    """
    powers = [gamma**k for k in range(len(counts))]
    total = sum(power * count for power, count in zip(powers, counts, strict=True))
    return [power * counts[0] / max(total, 1e-9) for power in powers]
