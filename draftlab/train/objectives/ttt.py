"""The objective of chains: training-time test of a head on a packed batch (methods §2, §3).

Step k runs only rows that still carry loss. Its row at position t reads token x_{t+1+k} and the
row's own previous output, attends to the step-0 keys of positions ≤ t of its conversation and to
its own keys of steps 1..k, at RoPE position t + k: what a server's cache would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.kernels.ttt_attention import document_starts
from draftlab.kernels.ttt_attention_types import StepKeyValues
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.chunked_attention import chunked_attention
from draftlab.train.objectives.loss import StepOutput, row_starts, take_rows


def unroll(head: DraftHead, batch: Batch) -> Iterator[StepOutput]:
    """Yields each step's output; gradients flow through all earlier steps.

    Of several layers all but the last run step 0 at every position: their outputs are the next
    one's keys.
    """
    starts, width = document_starts(batch.documents), batch.tokens.shape[1]
    everywhere = torch.arange(width, device=starts.device).expand_as(starts)
    past: list[tuple[Tensor, Tensor]] = []  # keys and values of step 0, of each layer
    own: list[StepKeyValues | None] = [None] * len(head.layers)
    hidden = first_hidden(head, batch)
    for k, rows in enumerate(batch.steps):
        if rows.index.shape[1] == 0:
            return
        own_positions = batch.positions.gather(1, rows.index) + k
        own_starts = row_starts(starts, rows)
        if k == 0:
            tokens, positions = batch.tokens.roll(-1, dims=1), batch.positions
            index, since = everywhere, starts
        else:
            tokens = batch.tokens.gather(1, (rows.index + 1 + k).clamp(max=width - 1))
            hidden, positions = take_rows(hidden, rows.select), own_positions
            index, since = rows.index, own_starts
        angles = head.rope.angles(positions)
        for number, layer in enumerate(head.layers):
            if number == 0:
                x, residual = head.layer_inputs(head.embed_tokens(tokens), hidden)
            else:
                x, residual = layer.input_layernorm(hidden), hidden
            made = layer.self_attn.key_value(x, angles)
            if k == 0:
                past.append(made)
            else:
                own[number] = StepKeyValues.extend(own[number], *made, rows.select)
            if k == 0 and number == len(head.layers) - 1:
                x, residual = take_rows(x, rows.index), take_rows(residual, rows.index)
                index, since, positions = rows.index, own_starts, own_positions
                angles = head.rope.angles(positions)
            query = layer.self_attn.query(x, angles)
            attended = chunked_attention(
                query,
                *past[number],
                index,
                since,
                own[number],
                positions=positions,
                chunk=layer.chunk,
            )
            hidden = layer.output(attended, residual)
        hidden = head.output_norm(hidden)
        yield StepOutput(hidden.flatten(0, 1)[rows.valid_rows], rows.teacher_index)


def first_hidden(head: DraftHead, batch: Batch) -> Tensor:
    """The hidden states [B, S, H] that the target's features give, with the batch's noise."""
    features = batch.last if head.config.reads_last else batch.features
    hidden = head.project_features(features.to(head.fc.weight.dtype))
    if batch.noise is not None:
        noise = batch.noise.values(batch.positions, hidden.shape[-1])
        hidden = hidden + noise.to(hidden.dtype)
    return hidden


def ttt_weights(gamma: float, counts: Sequence[int]) -> list[float]:
    """γ^k: every step's sum is divided by N_0, so later steps also count less for being fewer."""
    return [gamma**k for k in range(len(counts))]
