"""The objective of chains: training-time test of a head on a packed batch (methods §2, §3).

Step k runs only the rows that still carry loss. The row of position t reads token x_{t+1+k} and the
row's previous output. At RoPE position t + k it attends to the step-0 keys of positions ≤ t of its
conversation and to the row's keys of steps 1..k. These are the keys in a server's KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from draftlab.heads.head import DraftHead
from draftlab.kernels.ttt_attention import StepKeyValues, document_starts, ttt_attention
from draftlab.train.batch.loss_rows import StepRows
from draftlab.train.batch.packing import Batch
from draftlab.train.objectives.loss import StepOutput, row_starts, take_rows


def unroll(head: DraftHead, batch: Batch) -> Iterator[StepOutput]:
    """Yield each step's output; gradients flow through all earlier steps.

    All layers but the last run step 0 at every position, since the next layer computes its keys
    from their outputs.
    """
    starts, width = document_starts(batch.documents), batch.tokens.shape[1]
    everywhere = torch.arange(width, device=starts.device).expand_as(starts)
    first_keys: list[tuple[Tensor, Tensor]] = []  # keys and values of step 0, for each layer
    step_keys: list[StepKeyValues | None] = [None] * len(head.layers)
    hidden = first_hidden(head, batch)
    for k, rows in enumerate(batch.steps):
        if rows.index.shape[1] == 0:
            return
        loss_positions = batch.positions.gather(1, rows.index) + k
        loss_starts = row_starts(starts, rows)
        if k == 0:
            tokens, positions = batch.tokens.roll(-1, dims=1), batch.positions
            index, query_starts = everywhere, starts
        else:
            tokens = _step_tokens(batch, rows)
            hidden, positions = take_rows(hidden, rows.select), loss_positions
            index, query_starts = rows.index, loss_starts
        angles = head.rope.angles(positions)
        for number, layer in enumerate(head.layers):
            if number == 0:
                x, residual = head.layer_inputs(head.embed_at(tokens, positions), hidden)
            else:
                x, residual = layer.input_layernorm(hidden), hidden
            key_value = layer.self_attn.key_value(x, angles)
            if k == 0:
                first_keys.append(key_value)
            else:
                step_keys[number] = StepKeyValues.extend(step_keys[number], *key_value, rows.select)
            if k == 0 and number == len(head.layers) - 1:
                x, residual = take_rows(x, rows.index), take_rows(residual, rows.index)
                index, query_starts, positions = rows.index, loss_starts, loss_positions
                angles = head.rope.angles(positions)
            query = layer.self_attn.query(x, angles)
            attended = chunked_attention(
                query,
                *first_keys[number],
                index,
                window_starts(query_starts, index, k, layer.window),
                step_keys[number],
                positions=positions,
                chunk=layer.chunk,
            )
            hidden = layer.output(attended, residual)
        hidden = head.output_norm(hidden)
        yield StepOutput(hidden.flatten(0, 1)[rows.valid_rows], rows.teacher_index)


def _step_tokens(batch: Batch, rows: StepRows) -> Tensor:
    """Return the token [B, R] that each row of step k ≥ 1 reads; padding rows read any."""
    tokens = torch.zeros_like(rows.index).flatten()
    tokens[rows.valid_rows] = batch.tokens.flatten()[rows.teacher_index]
    return tokens.view_as(rows.index)


def first_hidden(head: DraftHead, batch: Batch) -> Tensor:
    """Return the hidden states [B, S, H] of step 0: projected features, with the batch's noise."""
    features = batch.last if head.config.reads_last else batch.features
    hidden = head.project_features(features.to(head.fc.weight.dtype))
    if batch.noise is not None:
        noise = batch.noise.values(batch.positions, hidden.shape[-1])
        hidden = hidden + noise.to(hidden.dtype)
    return hidden


def window_starts(starts: Tensor, index: Tensor, k: int, window: int | None) -> Tensor:
    """Return the first slots [B, R] whose step-0 keys the rows see in a window (None: all keys).

    The row at slot t has position t + k, so that it sees slots from t + k − window + 1 on. It sees
    all of its step keys, which are fewer than a window has.

    Args:
        starts: the first slots of the rows' conversations. index: the rows' slots.
    """
    return starts if window is None else torch.maximum(starts, index + (k + 1 - window))


def ttt_weights(gamma: float, counts: Sequence[int]) -> list[float]:
    """Return γ^k for each step k.

    Every step's sum is divided by N_0, so later steps also weigh less because they have fewer rows.
    """
    return [gamma**k for k in range(len(counts))]


def chunked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    starts: Tensor,
    step_keys: StepKeyValues | None,
    *,
    positions: Tensor,
    chunk: int | None,
) -> Tensor:
    """Return `ttt_attention` in which rows attend only to positions of their chunk, as in Llama 4.

    The row at slot t in step k has position t + k. It attends to positions from ⌊(t + k) / chunk⌋ ·
    chunk on. If this first position is at most t, the effect is that of a later document start.
    Otherwise the unroll has crossed a chunk boundary: the row attends to no step-0 key, and only to
    its step keys after the boundary.

    Args:
        positions: int64 [B, R], position of each row in its document, steps included.
        chunk: positions of a chunk; None: plain `ttt_attention`.
    """
    steps = 0 if step_keys is None else len(step_keys.keys)
    # The shapes show that no position reaches a second chunk, without waiting for the device.
    if chunk is None or key.shape[1] + steps <= chunk:
        return ttt_attention(query, key, value, index, starts, step_keys)
    offset = positions % chunk
    first = torch.maximum(starts, index + steps - offset)
    attended = ttt_attention(query, key, value, index, first, step_keys)
    if step_keys is None:
        return attended
    crossed = (first > index) & (starts <= index)
    return torch.where(
        crossed[..., None, None], _step_key_attention(query, step_keys, offset), attended
    )


def _step_key_attention(query: Tensor, step_keys: StepKeyValues, offset: Tensor) -> Tensor:
    """Return attention [B, R, heads, head_dim] to the last `offset` + 1 step keys of each row."""
    keys, values = (
        torch.stack([x.flatten(0, 1)[i] for x, i in zip(tensors, step_keys.rows, strict=True)], 2)
        for tensors in (step_keys.keys, step_keys.values)
    )
    num_steps, num_kv_heads = keys.shape[2:4]
    grouped = query.unflatten(2, (num_kv_heads, -1)) * query.shape[-1] ** -0.5
    scores = torch.einsum("brngd,brknd->brngk", grouped, keys)
    distance = torch.arange(num_steps - 1, -1, -1, device=query.device)
    mask = distance > offset[..., None]
    scores = scores.masked_fill(mask[:, :, None, None], float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.to(wide).softmax(-1).to(values.dtype)
    return torch.einsum("brngk,brknd->brngd", weights, values).flatten(2, 3)
