"""The drafter of block-parallel heads: one pass over a block, then a draw of each token in turn.

The draft KV cache holds context keys alone, made from the target's features. A block writes its
keys to the positions of future tokens. No later query reads them: the next step's context and block
overwrite every position that its queries see after the verified ones (methods §7).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from draftlab.engine.block_pass import EagerBlock, FusedBlock
from draftlab.engine.draft_sampler import DraftSampler, Proposal
from draftlab.engine.drafter import HeadDrafter, VerifiedFeatures
from draftlab.heads.block import BlockHead
from draftlab.kernels.chain_layout import chain_layout, last_rows
from draftlab.kernels.parallel_layout import parallel_layout


class BlockDrafter(HeadDrafter):
    """Drafter of a block head. A K below the trained one shortens the block.

    Args: those of `HeadDrafter`.
    """

    head: BlockHead
    drafting: Literal["parallel"] = "parallel"
    runner: EagerBlock
    eager_pass = EagerBlock
    fused_pass = FusedBlock

    @torch.inference_mode()
    def extend_cache(self, verified: VerifiedFeatures) -> None:
        self._write_context(verified)

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        if not verified.tokens.is_cuda:  # no static shapes: drop columns of padding
            verified = verified.first_columns(int(verified.counts.max()))
        last = self._write_context(verified)
        return self._draw(self._run_block(verified), last, verified)

    def _write_context(self, verified: VerifiedFeatures) -> Tensor:
        """Write context keys and values; return the position of each row's last pair, int64 [B]."""
        positions, counts = verified.positions, verified.counts
        layout = chain_layout(positions, counts, verified.block_table, self.block_size, 0)
        features, slots = verified.features.to(self.dtype), layout.slots.view_as(positions)
        self.runner.write_context(features, positions, slots, self.pools)
        return layout.last

    def _run_block(self, verified: VerifiedFeatures) -> Tensor:
        """Return the outputs [B, K, H] of the slots that predict a token.

        The block's first slot has the newest token, one position behind the last pair's.
        """
        config, counts, table = self.head.config, verified.counts, verified.block_table
        start = verified.positions[:, 0]
        num_slots = self.k + config.first_slot
        columns = parallel_layout(
            verified.tokens,
            counts - 1,
            start + (start >= 0),  # −1 remains padding
            table,
            block_size=self.block_size,
            max_length=self.max_length,
            mask_token_id=config.mask_token_id,
            k=num_slots,
        )
        block = (
            last_rows(x, counts, num_slots)
            for x in (columns.tokens, columns.positions, columns.slots)
        )
        return self.runner.run(*block, table, self.pools)[:, config.first_slot :]

    def _draw(self, outputs: Tensor, last: Tensor, verified: VerifiedFeatures) -> Proposal:
        """Draw the drafts of each slot in turn; a Markov head's depend on the one before.

        Args:
            outputs: [B, K, H]. last: int64 [B], the positions before the blocks.
        """
        keys, sampling = verified.keys, verified.sampling or self.sampling(verified.keys)
        logits = self.runner.logits(outputs.transpose(0, 1))  # [K, B, W]
        previous = last_rows(verified.tokens, verified.counts)[:, 0]
        sampler = DraftSampler(self.settings, len(logits), last, keys, sampling, logits)
        confidence = None
        for slot in range(len(logits)):
            if self.head.markov_head is not None:
                self.runner.add_markov_bias_(logits[slot], previous)
            if self.settings.confidence and self.head.confidence_head is not None:
                confidence = self.runner.confidence(outputs[:, slot], previous)
            previous = sampler.draw(slot, logits[slot], confidence)
        return sampler.proposal()
