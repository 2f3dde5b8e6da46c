"""Launching the kernels of `verify_triton.py`: `verify.verify` for tensors on a GPU."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from draftlab.kernels.dependent_launch import launch_options
from draftlab.kernels.rows import DraftDistribution, RowKeys, draft_index
from draftlab.kernels.verify import Verdict, has_limits, limit_logits
from draftlab.kernels.verify_triton import resample, settle, survey

SURVEY_BLOCK = 4096  # tokens a program surveys
RACE_BLOCK = 1024  # tokens a program races over, or sums min(p, q) over


def verify(
    logits: Tensor,
    drafts: Tensor,
    num_drafts: Tensor,
    distribution: DraftDistribution | None,
    positions: Tensor,
    rows: RowKeys,
    *,
    limited: bool | None = None,
    expect: bool = True,
) -> Verdict:
    """As `verify.verify`.

    Raises:
        ValueError: if the distribution's `index` is of another vocabulary than the logits.
    """
    if has_limits(rows, limited):
        logits = limit_logits(logits, rows)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_rows, width, vocab = logits.shape
    q = distribution if width > 1 else None
    q_logits, num_overlaps = None, 0
    if q is not None:
        index = draft_index(q.ids, vocab) if q.index is None else q.index
        if len(index) != vocab:
            raise ValueError(f"expected a draft index of {vocab} target ids, found {len(index)}")
        q_logits = q.logits if q.logits.stride(-1) == 1 else q.logits.contiguous()
        num_overlaps = triton.cdiv(len(q.ids), RACE_BLOCK) if expect else 0
    num_blocks, num_races = triton.cdiv(vocab, SURVEY_BLOCK), triton.cdiv(vocab, RACE_BLOCK)

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tops, sums = scratch(2, num_rows, width, num_blocks)
    bests = scratch(num_rows, width, num_blocks, dtype=torch.int32)
    values = scratch(num_rows, 2, num_races)
    tokens = scratch(num_rows, 2, num_races, dtype=torch.int32)
    overlaps = scratch(num_rows, width - 1, num_overlaps)
    accepted = scratch(num_rows, dtype=torch.int64)
    emitted = scratch(num_rows, dtype=torch.int64)
    probability = scratch(num_rows, width - 1)
    target = (logits, logits.stride(0), logits.stride(1), vocab)
    temperatures, num_drafts = rows.temperature.contiguous(), num_drafts.contiguous()
    sampled = None if q is None else q.sampled.contiguous()
    depths = triton.next_power_of_2(width)
    drafts = drafts if drafts.stride(-1) == 1 else drafts.contiguous()
    options = launch_options(logits.device)
    survey[(num_rows * width, num_blocks)](
        *target,
        temperatures,
        tops,
        sums,
        bests,
        num_blocks,
        WIDTH=width,
        SIZE=SURVEY_BLOCK,
        num_warps=8,
        **options,
    )
    resample[(num_rows, num_races + (width - 1) * num_overlaps)](
        *target,
        drafts,
        drafts.stride(0),
        num_drafts,
        positions.contiguous(),
        rows.seed.contiguous(),
        rows.prompt.contiguous(),
        temperatures,
        None if q is None else q.rows,
        q_logits,
        *((0, 0) if q_logits is None else q_logits.stride()[:2]),
        None if q is None else q.log_sum.contiguous(),
        None if q is None else q.temperature.contiguous(),
        sampled,
        None if q is None else q.ids,
        None if q is None else index,
        0 if q is None else len(q.ids),
        tops,
        sums,
        bests,
        num_blocks,
        accepted,
        emitted,
        probability,
        values,
        tokens,
        num_races,
        overlaps,
        num_overlaps,
        WIDTH=width,
        DEPTHS=depths,
        BLOCKS=triton.next_power_of_2(num_blocks),
        SIZE=RACE_BLOCK,
        HAS_Q=q is not None,
        **options,
    )
    settle[(num_rows,)](
        num_drafts,
        temperatures,
        sampled,
        emitted,
        probability,
        values,
        tokens,
        num_races,
        overlaps,
        num_overlaps,
        WIDTH=width,
        DEPTHS=depths,
        RACES=triton.next_power_of_2(num_races),
        OVERLAPS=triton.next_power_of_2(num_overlaps) if num_overlaps else 0,
        **options,
    )
    return Verdict(accepted, emitted, probability)
