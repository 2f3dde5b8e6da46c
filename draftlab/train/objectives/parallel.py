"""The objective of parallel drafting: (anchor, depth) pairs of a packed batch (methods §4).

Anchor a at depth 0 is the pair (x_{a+1}, g_a) at RoPE position a; at depth d ≥ 1 it is a masked
slot at position a + d. It predicts x_{a+2+d} with the teacher p_{a+1+d}; loss rows and teachers are
those of step d of an unroll. A slot attends to the depth-0 keys of positions ≤ a of its
conversation and to depths 1..d of its anchor. These are the keys in a server's KV cache.

Depth 0 runs at every position, since it is context. In the last layer only its keys do; its queries
run at the rows that carry loss. An anchor that keeps depth d also keeps depth d − 1, so the rows of
a depth are a subset of the previous depth's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftlab.heads.layers import Attention
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import StepOutput, row_starts, take_rows


def parallel_outputs(head: PeagleHead, batch: Batch) -> Iterator[StepOutput]:
    """Yield each depth's output."""
    steps = [rows for rows in batch.steps if rows.index.shape[1]]
    if not steps:
        return
    slots = _MaskedSlots(head, batch, steps[1:])
    next_tokens = batch.tokens.roll(-1, dims=1)
    index = torch.arange(next_tokens.shape[1], device=next_tokens.device).expand_as(next_tokens)
    starts = document_starts(batch.documents)
    angles = head.rope.angles(batch.positions)
    # Depth 0 at every position [B, S, H]; all masked slots enter as one vector [H].
    hidden = head.project_features(batch.features.to(head.fc.weight.dtype))
    masked = head.mask_state()
    for number, layer in enumerate(head.layers):
        if number == 0:
            x, residual = layer.inputs(head.embed(next_tokens), hidden)
            mask_x, mask_residual = layer.inputs(head.mask_embedding.to(masked.dtype), masked)
        else:
            x, residual = layer.input_layernorm(hidden), hidden
            mask_x, mask_residual = layer.input_layernorm(masked), masked
        key, value = layer.self_attn.key_value(x, angles)
        if number == len(head.layers) - 1:
            index, starts = steps[0].index, row_starts(starts, steps[0])
            x, residual = take_rows(x, index), take_rows(residual, index)
            angles = head.rope.angles(batch.positions.gather(1, index))
        query = layer.self_attn.query(x, angles)
        hidden = layer.output(ttt_attention(query, key, value, index, starts), residual)
        masked = layer.output(slots.attend(layer.self_attn, mask_x, key, value), mask_residual)
    for rows, output in zip(steps, [hidden, *slots.by_depth(masked)], strict=True):
        yield StepOutput(output.flatten(0, 1)[rows.valid_rows], rows.teacher_index)


class _MaskedSlots:
    """The masked slots of depths 1, 2, …, concatenated: [B, R] with R = Σ R_d."""

    def __init__(self, head: PeagleHead, batch: Batch, steps: Sequence[StepRows]) -> None:
        self.steps = steps
        self.widths = [rows.index.shape[1] for rows in steps]
        starts = document_starts(batch.documents)
        self.starts = [row_starts(starts, rows) for rows in steps]
        positions = [batch.positions.gather(1, r.index) + d for d, r in enumerate(steps, 1)]
        self.angles = head.rope.angles(torch.cat([batch.positions[:, :0], *positions], 1))

    def by_depth(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return x [B, R, …] split by depth."""
        return x.split(self.widths, 1) if self.widths else ()

    def attend(self, attention: Attention, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return attended values [B, R, heads, head_dim], from the input at the slots [B, R, …], or
        one vector for all, and keys and values of depth 0, [B, S, kv heads, head_dim].
        """
        query = attention.query(x, self.angles)
        keys, values = attention.key_value(x, self.angles)
        by_depth = (self.by_depth(t) for t in (query, keys, values.expand_as(keys)))
        step_keys, attended = None, [query[:, :0]]
        for rows, starts, queries, *key_value in zip(
            self.steps, self.starts, *by_depth, strict=True
        ):
            step_keys = StepKeyValues.extend(step_keys, *key_value, rows.select)
            attended.append(ttt_attention(queries, key, value, rows.index, starts, step_keys))
        return torch.cat(attended, 1)


def parallel_weights(gamma: float, counts: Sequence[int]) -> list[float]:
    """Return γ^d · N_0 / N_d for each depth d.

    Each depth's loss is thus the mean over its rows; otherwise depth 0 would dominate.
    """
    return [gamma**d * counts[0] / max(1, count) for d, count in enumerate(counts)]
