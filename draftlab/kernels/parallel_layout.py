"""The input layout of parallel drafting: one pass of the head gives K drafts (methods §4).

After a verify step a row has n new pairs (x_{p+1}, g_p). Its pass holds, from position `start` on,

    n pairs      x_{p+1} with the target's feature g_p; the last pair samples draft 1
    K − 1 masks  the mask token with `mask_hidden`; mask d samples draft d + 1
    the rest     padding at the end: token 0, position −1, slot −1

under plain causal attention. A query of q tokens thus takes q + K − 1 columns however many of its
drafts were rejected, so shapes are known before the verdict is. Column j of the pass takes feature
j of the verify step; where `is_mask`, `mask_hidden`.

Positions from `max_length` on are padding too: they write nothing and never wrap around, and what
they would sample nobody verifies. Rows come as a rectangle or flattened one behind another, as in
vLLM. This file is the eager reference and the entry point; `parallel_layout_triton.py` does the
same in one kernel. Nothing here waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ParallelLayout:
    """One pass of a head that drafts in parallel.

    Shapes are [B, M] for a rectangle, [T] for flattened rows.

    Attributes:
        tokens: int64, x_{p+1}, the mask token, or 0.
        positions: int64, consecutive from a row's start; −1 for padding, at the row's end.
        slots: int64, block · block size + offset of the position's key; −1 writes nothing.
        is_mask: bool, where `mask_hidden` takes the place of a feature.
        sample_index: int64 [B, K], the column, or the flat index, that each draft is sampled from.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    is_mask: Tensor
    sample_index: Tensor


@dataclass(frozen=True)
class RaggedLayout(ParallelLayout):
    """`ParallelLayout` of flattened rows.

    Attributes:
        feature_index: int64 [T], which of the input's tokens each entry's feature belongs to; 0
            for masks and padding, which have none.
        query_start_loc: int64 [B + 1], where the rows begin.
    """

    feature_index: Tensor
    query_start_loc: Tensor


def layout_size(num_tokens: int, num_rows: int, k: int) -> int:
    """Entries of a pass over `num_rows` rows of together `num_tokens` query tokens.

    Buffers must hold it: masks come on top of a full batch of tokens.
    """
    return num_tokens + num_rows * (k - 1)


def parallel_layout(
    out_tokens: Tensor,
    accepted: Tensor,
    start: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
) -> ParallelLayout:
    """The pass after a verify step of Q = K + 1 tokens a row, or after a chunk of a prompt.

    Args:
        out_tokens: int64 [B, Q], x_{p+1} of each row's new positions; from accepted + 1 on ignored.
        accepted: int64 [B], drafts accepted: the row has accepted + 1 pairs.
        start: int64 [B], position of each row's first pair; negative for a row of padding alone.
        block_table: int32 [B, N], blocks of the rows' keys; block 0 is nobody's and never written.
        block_size: positions in a block.
        max_length: positions a row may take.
        mask_token_id: the head's mask token.
        k: drafts a pass, K.

    Returns:
        The layout, M = Q + K − 1 columns wide.
    """
    if out_tokens.is_cuda:
        from draftlab.kernels.parallel_layout_triton import parallel_layout_triton as lay_out
    else:
        lay_out = parallel_layout_reference
    return lay_out(
        out_tokens,
        accepted,
        start,
        block_table,
        block_size=block_size,
        max_length=max_length,
        mask_token_id=mask_token_id,
        k=k,
    )


def ragged_layout(
    token_ids: Tensor,
    next_token: Tensor,
    query_start_loc: Tensor,
    rejected: Tensor,
    start: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
) -> RaggedLayout:
    """The pass over flattened rows, prompts and verified drafts mixed; shifts the tokens itself.

    Args:
        token_ids: int64 [T], what the target was fed, row behind row.
        next_token: int64 [B], the token that each row has emitted after its accepted ones.
        query_start_loc: int64 or int32 [B + 1], where the rows begin in `token_ids`.
        rejected: int64 [B], how many of a row's last tokens were rejected, fewer than it has.
        start: int64 [B], position of each row's first token.
        block_table, block_size, max_length, mask_token_id, k: as in `parallel_layout`.

    Returns:
        The layout, `layout_size(T, B, K)` entries long.
    """
    if token_ids.is_cuda:
        from draftlab.kernels.parallel_layout_triton import ragged_layout_triton as lay_out
    else:
        lay_out = ragged_layout_reference
    return lay_out(
        token_ids,
        next_token,
        query_start_loc,
        rejected,
        start,
        block_table,
        block_size=block_size,
        max_length=max_length,
        mask_token_id=mask_token_id,
        k=k,
    )


def parallel_layout_reference(
    out_tokens: Tensor,
    accepted: Tensor,
    start: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
) -> ParallelLayout:
    """`parallel_layout`, eager."""
    num_rows, width = out_tokens.shape
    column = torch.arange(layout_size(width, 1, k), device=out_tokens.device).expand(num_rows, -1)
    row = torch.arange(num_rows, device=out_tokens.device)[:, None]
    pairs = (accepted + 1)[:, None]
    positions, slots = _place(
        row, column, pairs, start[:, None], block_table, block_size, max_length, k
    )
    shown = out_tokens.gather(1, column.clamp(max=width - 1))
    is_mask = (column >= pairs) & (positions >= 0)
    tokens = shown.where(~is_mask, mask_token_id).where(positions >= 0, 0)
    depth = torch.arange(k, device=out_tokens.device)
    return ParallelLayout(tokens, positions, slots, is_mask, accepted[:, None] + depth)


def ragged_layout_reference(
    token_ids: Tensor,
    next_token: Tensor,
    query_start_loc: Tensor,
    rejected: Tensor,
    start: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    max_length: int,
    mask_token_id: int,
    k: int,
) -> RaggedLayout:
    """`ragged_layout`, eager."""
    num_tokens, num_rows = len(token_ids), len(next_token)
    first = query_start_loc.long()
    bounds = first + torch.arange(num_rows + 1, device=first.device) * (k - 1)
    entry = torch.arange(layout_size(num_tokens, num_rows, k), device=first.device)
    row = torch.searchsorted(bounds[1:], entry, right=True)
    column = entry - bounds[row]
    pairs = first.diff() - rejected
    positions, slots = _place(
        row, column, pairs[row], start[row], block_table, block_size, max_length, k
    )
    is_pair = (column < pairs[row]) & (positions >= 0)
    is_mask = (column >= pairs[row]) & (positions >= 0)
    source = first[row] + column
    shifted = token_ids[(source + 1).clamp(max=num_tokens - 1)]
    shown = next_token[row].where(column == pairs[row] - 1, shifted)
    tokens = shown.where(~is_mask, mask_token_id).where(positions >= 0, 0)
    samples = (bounds[:-1] + pairs - 1)[:, None] + torch.arange(k, device=first.device)
    return RaggedLayout(
        tokens, positions, slots, is_mask, samples, source.where(is_pair, 0), bounds
    )


def _place(
    row: Tensor,
    column: Tensor,
    pairs: Tensor,
    start: Tensor,
    block_table: Tensor,
    block_size: int,
    max_length: int,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Positions and slots of broadcastable entries `column` of rows `row`."""
    position = start + column
    limit = min(max_length, block_table.shape[1] * block_size)
    real = (column < pairs + k - 1) & (start >= 0) & (position < limit)
    at = position.where(real, 0)
    blocks = block_table[row, at // block_size].long()
    slots = (blocks * block_size + at % block_size).where(real & (blocks > 0), -1)
    return position.where(real, -1), slots
