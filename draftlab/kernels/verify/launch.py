"""The launch of `verify.verify` on a GPU; kernels in `verify/triton.py`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from draftlab.kernels.launching import launch_options
from draftlab.kernels.sampling import apply_top_k_top_p, uses_top_k_top_p
from draftlab.kernels.sampling.types import VerifyResult, draft_index
from draftlab.kernels.verify.triton import (
    BLOCK,
    OVERLAPS,
    TOKEN,
    finalize,
    reduce_logits,
    reject_and_resample,
)

REDUCE_BLOCK = 4096  # tokens of one program of `reduce_logits`
RACE_BLOCK = 1024  # tokens of one program of `reject_and_resample`


def verify(
    logits,
    drafts,
    num_drafts,
    distribution,
    positions,
    rows,
    *,
    limited=None,
    expect=True,
    block=False,
) -> VerifyResult:
    """Launch `verify.verify`.

    Raises:
        ValueError: if the distribution's `index` does not fit the logits' vocabulary.
    """
    (num_rows, width), vocab = (len(drafts), drafts.shape[1] + 1), logits.shape[-1]
    if uses_top_k_top_p(rows, limited):
        logits = apply_top_k_top_p(logits, rows)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    num_blocks, num_races = triton.cdiv(vocab, REDUCE_BLOCK), triton.cdiv(vocab, RACE_BLOCK)
    q, num_overlaps = distribution if width > 1 else None, 0
    of_logits, of_rows, of_ids = (None, None, 0, 0), (None, None), (None, None, 0)
    if q is not None:
        index = draft_index(q.ids, vocab) if q.index is None else q.index
        if len(index) != vocab:
            raise ValueError(f"expected a draft index of {vocab} target ids, found {len(index)}")
        q_logits = q.logits if q.logits.stride(-1) == 1 else q.logits.contiguous()
        of_logits = q.rows, q_logits, *q_logits.stride()[:2]
        of_rows = q.log_sum.contiguous(), q.temperature.contiguous()
        of_ids = q.ids, index, len(q.ids)
        num_overlaps = triton.cdiv(len(q.ids), RACE_BLOCK) if expect or block else 0
    block = block and q is not None

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    block_argmax = scratch(num_rows, width, num_blocks, dtype=torch.int32)
    race_tokens = scratch(num_rows, 2, num_races, dtype=torch.int32)
    overlaps = scratch(num_rows, width - 1, num_overlaps)
    accepted, emitted = scratch(num_rows, dtype=torch.int64), scratch(num_rows, dtype=torch.int64)
    probability = scratch(num_rows, width - 1)
    # The arguments that several kernels take, in their order.
    target = logits, *logits.stride()[:2], vocab
    blocks = *scratch(2, num_rows, width, num_blocks), block_argmax, num_blocks
    races = scratch(num_rows, 2, num_races), race_tokens, num_races, overlaps, num_overlaps
    temperatures, num_drafts = rows.temperature.contiguous(), num_drafts.contiguous()
    drafts = drafts if drafts.stride(-1) == 1 else drafts.contiguous()
    depths, options = triton.next_power_of_2(width), launch_options(logits.device)
    reduce_logits[(num_rows * width, num_blocks)](
        *target,
        temperatures,
        num_drafts,
        *blocks,
        WIDTH=width,
        SIZE=REDUCE_BLOCK,
        num_warps=8,
        **options,
    )
    num_sums, sums = (width - 1) * num_overlaps, triton.next_power_of_2(max(num_overlaps, 1))
    launches = [(TOKEN, num_races + num_sums)]
    if block:
        launches = [(OVERLAPS, num_sums), (BLOCK, num_races)]
    arguments = (
        *target,
        drafts,
        drafts.stride(0),
        num_drafts,
        *(x.contiguous() for x in (positions, rows.seed, rows.prompt)),
        temperatures,
        *of_logits,
        *of_rows,
        *of_ids,
        *blocks,
        accepted,
        emitted,
        probability,
        *races,
    )
    for mode, programs in launches:
        reject_and_resample[(num_rows, programs)](
            *arguments,
            WIDTH=width,
            DEPTHS=depths,
            BLOCKS=triton.next_power_of_2(num_blocks),
            SIZE=RACE_BLOCK,
            SUMS=sums,
            HAS_Q=q is not None,
            MODE=mode.value,
            **options,
        )
    finalize[(num_rows,)](
        num_drafts,
        temperatures,
        emitted,
        probability,
        *races,
        WIDTH=width,
        DEPTHS=depths,
        RACES=triton.next_power_of_2(num_races),
        SUMS=sums if num_overlaps and not block else 0,  # a block's are written already
        **options,
    )
    return VerifyResult(accepted, emitted, probability)
