"""The drafter of parallel heads: K drafts from one pass (methods §4, servers §1.5)."""

from __future__ import annotations

from typing import Any, Literal

import torch

from draftlab.engine.draft_sampler import DraftSampler, Proposal
from draftlab.engine.drafter import HeadDrafter, VerifiedFeatures
from draftlab.engine.eager_head import PassLayout
from draftlab.heads.head import DraftHead
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.parallel_layout import parallel_layout
from draftlab.kernels.step_layout.types import MaskedColumns


class ParallelDrafter(HeadDrafter):
    """Drafter of a parallel head: the last true pair drafts the first token, masked slots the rest.

    Masked slots write their keys to the positions of future tokens. No later query reads them: the
    next pass overwrites every position that its queries see after the verified ones.

    Args: those of `HeadDrafter`; the head has a mask token and `mask_hidden`.
    """

    drafting: Literal["parallel"] = "parallel"

    def __init__(self, head: DraftHead, k: int, **options: Any) -> None:
        super().__init__(head, k, **options)
        self.mask_token_id = head.mask_token_id

    @torch.inference_mode()
    def prepare_runner(self) -> None:
        self.mask_state = self.runner.project_features(self.head.mask_hidden)[0]

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        k = self.k
        if not verified.tokens.is_cuda:  # no static shapes: drop columns of padding
            verified = verified.first_columns(int(verified.counts.max()))
        counts, table = verified.counts, verified.block_table
        columns = parallel_layout(
            verified.tokens,
            counts - 1,
            verified.positions[:, 0],
            table,
            block_size=self.block_size,
            max_length=self.max_length,
            mask_token_id=self.mask_token_id,
            k=k,
        )
        cos, sin = self.runner.angles(columns.positions.flatten())
        layout = PassLayout(
            columns.slots,
            (cos.unflatten(0, columns.slots.shape), sin.unflatten(0, columns.slots.shape)),
            columns.positions,
            last_rows(columns.positions, counts, k),
            counts,
            MaskedColumns(columns.is_mask, self.mask_state),
        )
        hidden = self.runner.project_features(verified.features.to(self.dtype))
        outputs = self._forward(columns.tokens, hidden, layout, table)
        keys, sampling = verified.keys, verified.sampling or self.sampling(verified.keys)
        logits = outputs.new_empty(k, len(outputs), len(self.draft_ids))
        self.runner.logits(outputs.transpose(0, 1).flatten(0, 1), out=logits.flatten(0, 1))
        last = layout.output_positions[:, 0].contiguous()
        sampler = DraftSampler(self.settings, k, last, keys, sampling, logits)
        sampler.draw_all(logits)
        return sampler.proposal()
