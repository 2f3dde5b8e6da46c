"""The drafter of parallel heads: K drafts from one pass (methods §4, servers §1.5)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from draftlab.engine.drafter import HeadDrafter, Proposal, VerifiedFeatures
from draftlab.engine.eager_head import Pass
from draftlab.heads.head import DraftHead
from draftlab.kernels.chain_layout import last_rows
from draftlab.kernels.parallel_layout import parallel_layout
from draftlab.kernels.sampling import argmax_draft, sample_draft
from draftlab.kernels.sampling_types import SamplingMetadata
from draftlab.kernels.step_types import MaskedColumns


class ParallelDrafter(HeadDrafter):
    """A parallel head: the last true pair drafts the first token, masked slots the others.

    Keys of masked slots lie where true pairs will come. They are never seen later: the next pass
    writes every position that its queries see beyond the pairs that were there before.

    Args: those of `HeadDrafter`; the head has a mask token and `mask_hidden`.
    """

    kind: Literal["parallel"] = "parallel"

    def __init__(self, head: DraftHead, k: int, **options: Any) -> None:
        super().__init__(head, k, **options)
        self.mask_token_id = head.mask_token_id

    def start(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_length: int | None = None,
        cpu_prepacked: bool = False,
    ) -> None:
        super().start(num_blocks, block_size, max_length=max_length, cpu_prepacked=cpu_prepacked)
        with torch.inference_mode():  # the same in every pass
            self.mask_state = self.passes.project_features(self.head.mask_hidden)[0]

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        if not verified.tokens.is_cuda:  # shapes need not be static: no columns of padding alone
            verified = verified.first_columns(int(verified.counts.max()))
        counts, table = verified.counts, verified.block_table
        layout = parallel_layout(
            verified.tokens,
            counts - 1,
            verified.positions[:, 0],
            table,
            block_size=self.block_size,
            max_length=self.max_length,
            mask_token_id=self.mask_token_id,
            k=self.k,
        )
        place = Pass(
            layout.slots,
            self._angles(layout.positions),
            layout.positions,
            last_rows(layout.positions, counts, self.k),
            counts,
            MaskedColumns(layout.is_mask, self.mask_state),
        )
        hidden = self.passes.project_features(verified.features.to(self.dtype))
        outputs = self._forward(layout.tokens, hidden, place, table)
        sampling = verified.sampling or self.sampling(verified.keys)
        return self._draw(outputs, place.asked[:, 0].contiguous(), verified.keys, sampling)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, M, …] of positions [B, M]."""
        cos, sin = self.passes.angles(positions.flatten())
        return cos.unflatten(0, positions.shape), sin.unflatten(0, positions.shape)

    def _draw(
        self, outputs: Tensor, last: Tensor, keys: SamplingMetadata, sampling: tuple[Tensor, Tensor]
    ) -> Proposal:
        """A draft from each of the outputs [B, K, H]; `last` [B]: positions of the first."""
        shape = self.k, len(outputs)
        tokens = keys.seed.new_empty(shape)
        # Depth by depth, so that each is one piece of memory: [K, B, …].
        logits = outputs.new_empty(*shape, len(self.draft_ids))
        self.passes.logits(outputs.transpose(0, 1).flatten(0, 1), out=logits.flatten(0, 1))
        if not self.draft_probs:
            argmax_draft(logits.flatten(0, 1), ids=self.draft_ids, out=tokens.flatten())
            return self._proposal(tokens, None, None, sampling)
        log_sum = keys.temperature.new_empty(shape)
        for depth in range(self.k):
            sample_draft(
                logits[depth],
                last,
                keys,
                *sampling,
                ids=self.draft_ids,
                offset=2 + depth,  # slot p predicts position p + 2
                out=(tokens[depth], log_sum[depth]),
            )
        return self._proposal(tokens, logits, log_sum, sampling)
