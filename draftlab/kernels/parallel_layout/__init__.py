"""The input batch of parallel drafting (P-EAGLE): one pass gives K drafts (docs/methods.md §4).

After a verify step a row has n new pairs (x_{p+1}, g_p). Its pass holds, from position `start` on,

    n pairs      x_{p+1} with the target's feature g_p; the last pair samples draft 1
    K − 1 masks  the mask token with `mask_hidden`; mask d samples draft d + 1
    the rest     padding at the end: token 0, position −1, slot −1

under plain causal attention. A query of q tokens thus takes q + K − 1 columns whatever the number
of rejected drafts, so shapes are known before verification. Column j of the pass takes feature j of
the verify step; where `is_mask`, `mask_hidden`.

Positions from `max_length` on are padding too: they write nothing and never wrap around, and the
drafts sampled there are not verified. The host never waits. `parallel_layout/triton.py` does the
same in one kernel. Tests: tests/kernels/test_pass_layouts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftlab.kernels.dispatch import triton_operator
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.step_layout.types import ParallelLayout


@triton_operator("parallel_layout.triton")
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
    """Return the batch after a verify step of Q = K + 1 tokens a row, or after a prompt's chunk.

    Args:
        out_tokens: int64 [B, Q], x_{p+1} of each row's new positions; from accepted + 1 on ignored.
        accepted: int64 [B], drafts accepted: the row has accepted + 1 pairs.
        start: int64 [B], position of each row's first pair; negative for a row of padding alone.
        block_table: int32 [B, N], blocks of the rows' keys; block 0 belongs to no row and is never
            written.
        block_size: positions in a block.
        max_length: positions a row may take.
        mask_token_id: the head's mask token.
        k: drafts a pass, K.

    Returns:
        The layout, M = Q + K − 1 columns wide.
    """
    num_rows, width = out_tokens.shape
    column = torch.arange(width + k - 1, device=out_tokens.device).expand(num_rows, -1)
    num_pairs, start = (accepted + 1)[:, None], start[:, None]
    position = start + column
    limit = min(max_length, block_table.shape[1] * block_size)
    is_real = (column < num_pairs + k - 1) & (start >= 0) & (position < limit)
    position = position.where(is_real, -1)
    is_mask = (column >= num_pairs) & is_real
    shown = out_tokens.gather(1, column.clamp(max=width - 1))
    return ParallelLayout(
        shown.where(~is_mask, mask_token_id).where(is_real, 0),
        position,
        slot_mapping(block_table, position, block_size),
        is_mask,
        accepted[:, None] + torch.arange(k, device=out_tokens.device),
    )
