"""The drafter of block-parallel heads: one pass over a block, then a draw of each token in turn.

The draft KV cache holds context keys alone, made from the target's features. A block writes its
keys to the positions of future tokens. No later query reads them: the next step's context and block
overwrite every position that its queries see after the verified ones (methods §7).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.drafter import HeadDrafter, Proposal, VerifiedFeatures
from draftlab.engine.eager_head import EagerHead, HeadRunner
from draftlab.heads.block import BlockConfig, BlockHead
from draftlab.kernels.paged_attention import attend_paged, slot_mapping, write_paged
from draftlab.kernels.sampling import argmax_draft, sample_draft


class BlockDrafter(HeadDrafter):
    """Drafter of a block head. A K below the trained one shortens the block.

    Args: those of `HeadDrafter`.
    """

    head: BlockHead
    drafting: Literal["parallel"] = "parallel"

    def new_runner(self, *, cpu_prepacked: bool) -> HeadRunner:
        return EagerHead(self.head)

    @torch.inference_mode()
    def extend_cache(self, verified: VerifiedFeatures) -> None:
        context = self.head.project_features(verified.features.to(self.dtype))
        slots = slot_mapping(verified.block_table, verified.positions, self.block_size)
        angles = self.runner.angles(verified.positions)
        for layer, pool in zip(self.head.layers, self.pools, strict=True):
            write_paged(*layer.self_attn.key_value(context, angles), *pool, slots)

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
        angles = self.runner.angles(positions)
        cache_slots = slot_mapping(block_table, positions, self.block_size)
        hidden = head.embed(head.block_tokens(newest, len(slots)))
        for layer, pool in zip(head.layers, self.pools, strict=True):
            x = layer.input_layernorm(hidden)
            write_paged(*layer.self_attn.key_value(x, angles), *pool, cache_slots)
            query = layer.self_attn.query(x, angles)
            attended = _attend_block(query, pool, block_table, positions, config)
            hidden = layer.output(attended, hidden)
        return hidden[:, config.first_slot :]

    def _draw(
        self, outputs: Tensor, newest: Tensor, last: Tensor, verified: VerifiedFeatures
    ) -> Proposal:
        """Draw the drafts of each slot in turn; a Markov head's depend on the one before."""
        head, keys = self.head, verified.keys
        sampling = verified.sampling or self.sampling(keys)
        # Slots are the outer dimension, so that each one's rows are contiguous: [K, B, …].
        normed = head.normed(outputs.transpose(0, 1))
        logits = F.linear(normed, head.lm_head.weight)
        shape = self.k, len(outputs)
        tokens, log_sum = keys.seed.new_empty(shape), keys.temperature.new_empty(shape)
        previous = newest
        for slot in range(self.k):
            if head.markov_head is not None:
                factors = head.markov_factors(previous)
                logits[slot].addmm_(factors, head.markov_head.markov_w2.weight.t())
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


def _attend_block(
    query: Tensor,
    pool: tuple[Tensor, Tensor],
    block_table: Tensor,
    positions: Tensor,
    config: BlockConfig,
) -> Tensor:
    """Return attention [B, slots, heads, head_dim] to the context and to the block's own keys.

    Args:
        positions: int64 [B, slots]; −1 is padding, at the end.
    """
    scale = config.head_dim**-0.5
    if config.is_causal:
        return attend_paged(query, *pool, block_table, positions, scale=scale)
    # All slots see the keys up to the last one's, so they are further heads of one query there.
    grouped = query.unflatten(2, (config.num_key_value_heads, -1)).permute(0, 2, 3, 1, 4)
    last = positions.amax(1, keepdim=True)
    attended = attend_paged(grouped.flatten(1, 3)[:, None], *pool, block_table, last, scale=scale)
    return attended.view(grouped.shape).permute(0, 3, 1, 2, 4).flatten(2, 3)
