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
from draftlab.engine.drafter import HeadDrafter, Proposal, VerifiedFeatures
from draftlab.heads.block import BlockHead
from draftlab.kernels.paged_attention import slot_mapping
from draftlab.kernels.sampling import argmax_draft, sample_draft


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
        slots = slot_mapping(verified.block_table, verified.positions, self.block_size)
        features = verified.features.to(self.dtype)
        self.runner.write_context(features, verified.positions, slots, self.pools)

    @torch.inference_mode()
    def propose(self, verified: VerifiedFeatures) -> Proposal:
        if not verified.tokens.is_cuda:  # no static shapes: drop columns of padding
            verified = verified.first_columns(int(verified.counts.max()))
        self.extend_cache(verified)
        newest, last = (
            x.gather(1, verified.counts[:, None] - 1)[:, 0]
            for x in (verified.tokens, verified.positions)
        )
        outputs = self._run_block(newest, last, verified.block_table)
        return self._draw(outputs, newest, last, verified)

    def _run_block(self, newest: Tensor, last: Tensor, block_table: Tensor) -> Tensor:
        """Return the outputs [B, K, H] of the slots that predict a token.

        Positions from `max_length` on are padding, which no query sees.

        Args:
            newest: int64 [B], the anchors' tokens.
            last: int64 [B], the positions before the anchors; −1 for a row of padding alone.
            block_table: int32 [B, N].
        """
        head, config = self.head, self.head.config
        slots = torch.arange(self.k + config.first_slot, device=newest.device)
        positions = last[:, None] + 1 + slots
        limit = min(self.max_length, block_table.shape[1] * self.block_size)
        positions = positions.where((last[:, None] >= 0) & (positions < limit), -1)
        cache_slots = slot_mapping(block_table, positions, self.block_size)
        tokens = head.block_tokens(newest, len(slots))
        outputs = self.runner.run(tokens, positions, cache_slots, block_table, self.pools)
        return outputs[:, config.first_slot :]

    def _draw(
        self, outputs: Tensor, newest: Tensor, last: Tensor, verified: VerifiedFeatures
    ) -> Proposal:
        """Draw the drafts of each slot in turn; a Markov head's depend on the one before."""
        head, keys = self.head, verified.keys
        sampling = verified.sampling or self.sampling(keys)
        # Slots are the outer dimension, so that each one's rows are contiguous: [K, B, …].
        logits = self.runner.logits(outputs.transpose(0, 1))
        shape = self.k, len(outputs)
        tokens, log_sum = keys.seed.new_empty(shape), keys.temperature.new_empty(shape)
        previous = newest
        for slot in range(self.k):
            if head.markov_head is not None:
                self.runner.add_markov_bias_(logits[slot], previous)
            if self.draft_probs:
                sample_draft(
                    logits[slot],
                    last,
                    keys,
                    *sampling,
                    ids=self.draft_ids,
                    offset=2 + slot,  # slot k of the block behind position t predicts t + 2 + k
                    out=(tokens[slot], log_sum[slot]),
                )
            else:
                argmax_draft(logits[slot], ids=self.draft_ids, out=tokens[slot])
            previous = tokens[slot]
        if not self.draft_probs:
            return self._proposal(tokens, None, None, sampling)
        return self._proposal(tokens, logits, log_sum, sampling)
