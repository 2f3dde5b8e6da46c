"""The drafter of block-parallel heads: one pass over a block, then a draw of each token in turn.

The draft KV cache holds context keys alone, made from the target's features. A block's slots
attend to them and to each other, and write keys to the positions of future tokens. No later query
reads those: the next step's context and block overwrite every position that its queries see after
the verified ones (methods §7).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.draft_sampler import DraftSampler, Proposal
from draftlab.engine.drafter import HeadDrafter, VerifiedFeatures, without_padding
from draftlab.engine.head_pass import Pools, fused_layers, is_on_gpu_in_one_dtype
from draftlab.heads.block import BlockConfig, BlockHead
from draftlab.heads.dflash2 import Dflash2Head, never_drawn, transition_scores
from draftlab.heads.layers import Angles
from draftlab.kernels.chain_layout import chain_layout, last_rows
from draftlab.kernels.linear import linear, linear_then_norm
from draftlab.kernels.paged_attention import attend_paged, write_paged
from draftlab.kernels.rope_write import rope_angles, rope_write


class EagerBlock:
    """The passes in the head's own modules: any device, any dtype."""

    def __init__(self, head: BlockHead) -> None:
        self.head = head

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, pools: Pools
    ) -> None:
        """Write the context keys and values of features [B, M, F] to each layer's pool.

        Args:
            positions: int64 [B, M]; −1 is padding.
            slots: int64 [B, M], of the cache; −1 writes nothing.
        """
        context = self.head.project_features(features)
        angles = self._angles(positions)
        for layer, pool in zip(self.head.layers, pools, strict=True):
            write_paged(*layer.self_attn.key_value(context, angles), *pool, slots)

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pools: Pools
    ) -> Tensor:
        """Return the outputs [B, S, H] of blocks, whose keys and values are written to the pools.

        Args:
            tokens: int64 [B, S], of S slots.
            positions, slots: int64 [B, S], as in `write_context`; padding comes last.
            block_table: int32 [B, N].
        """
        hidden, angles = self.head.embed(tokens), self._angles(positions)
        seen = last_seen_keys(positions, self.head.config)
        for number, (layer, pool) in enumerate(zip(self.head.layers, pools, strict=True)):
            x, finish = layer.begin(hidden)
            query = self.write_cache(number, x, angles, pool, slots)
            scale = query.shape[-1] ** -0.5
            options = {"scale": scale, "window": layer.window, "last_seen": seen}
            hidden = finish(attend_paged(query, *pool, block_table, positions, **options))
        return hidden

    def write_cache(
        self, number: int, x: Tensor, angles: Angles, pool: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        """Write the keys and values of a layer's input x [B, S, H] to its pool; return queries
        [B, S, heads, head_dim].
        """
        attention = self.head.layers[number].self_attn
        write_paged(*attention.key_value(x, angles), *pool, slots)
        return attention.query(x, angles)

    def logits(self, outputs: Tensor) -> Tensor:
        """Return the logits [..., D], without a Markov bias, of outputs [..., H]."""
        return F.linear(self.head.normed(outputs), self.head.lm_head.weight)

    def confidence(self, outputs: Tensor, previous: Tensor) -> Tensor:
        """Return the confidence head's logits [B] of outputs [B, H] after tokens `previous` [B]."""
        factors = self.head.markov_factors(previous)
        return self.head.confidence_logits(self.head.normed(outputs), factors)

    def add_markov_bias_(self, logits: Tensor, previous: Tensor) -> None:
        """Add the bias by the tokens `previous` [B] to logits [B, D] in place."""
        weight = self.head.markov_head.markov_w2.weight
        logits.addmm_(self.head.markov_factors(previous), weight.t())

    def _angles(self, positions: Tensor) -> Angles:
        return self.head.rope.angles(positions.clamp(min=0))


class FusedBlock(EagerBlock):
    """The passes in the kernels of `FusedHead` (CUDA).

    The context keys and values of all layers are one product.

    Args:
        head: on CUDA, in one dtype.
    """

    supports = staticmethod(is_on_gpu_in_one_dtype)

    @torch.no_grad()
    def __init__(self, head: BlockHead) -> None:
        super().__init__(head)
        self.embeddings, self.eps = head.embedding_table(), head.config.rms_norm_eps
        self.first_norm, self.layers = head.layer.input_layernorm.weight, fused_layers(head)
        attentions = [layer.self_attn for layer in head.layers]
        self.context_weight = torch.cat(
            [p.weight for attention in attentions for p in (attention.k_proj, attention.v_proj)]
        )

    def write_context(
        self, features: Tensor, positions: Tensor, slots: Tensor, pools: Pools
    ) -> None:
        rows = features.flatten(0, 1)
        _, context = linear_then_norm(
            rows, self.head.fc.weight, self.head.hidden_norm.weight, self.eps
        )
        key_values = linear(context, self.context_weight).chunk(len(self.layers), 1)
        angles, slots = self._angles(positions), slots.flatten()
        for layer, pool, key_value in zip(self.layers, pools, key_values, strict=True):
            w = layer.weights
            norms = {"q_norm": w.q_norm, "k_norm": w.k_norm, "eps": self.eps}
            rope_write(key_value, angles, *pool, slots, **norms)

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pools: Pools
    ) -> Tensor:
        shape, slots, angles = tokens.shape, slots.flatten(), self._angles(positions)
        hidden = x = F.embedding(tokens.flatten(), self.embeddings)
        norm_weight: Tensor | None = self.first_norm
        seen = last_seen_keys(positions, self.head.config)
        for layer, pool in zip(self.layers, pools, strict=True):
            query = layer.write_cache(x, angles, pool, slots, norm_weight=norm_weight)
            query = query.unflatten(0, shape)
            hidden, x = layer.output(query, hidden, pool, block_table, positions, seen)
            norm_weight = None  # the feed-forward has begun the next norm
        return hidden.unflatten(0, shape)

    def logits(self, outputs: Tensor) -> Tensor:
        rows = outputs.flatten(0, -2)
        norm = {"norm_weight": self.head.norm.weight, "eps": self.eps}
        return linear(rows, self.head.lm_head.weight, **norm).unflatten(0, outputs.shape[:-1])

    def add_markov_bias_(self, logits: Tensor, previous: Tensor) -> None:
        factors = F.embedding(previous, self.head.markov_head.markov_w1.weight)
        linear(factors, self.head.markov_head.markov_w2.weight, residual=logits, out=logits)

    def _angles(self, positions: Tensor) -> Angles:
        rope, dtype = self.head.rope, self.head.fc.weight.dtype
        return rope_angles(positions.flatten(), rope.frequencies, rope.scaling, dtype)


class FusedConvolvedBlock(FusedBlock):
    """The passes of `FusedBlock`, with the head's own convolutions between them."""

    run = EagerBlock.run

    def write_cache(
        self, number: int, x: Tensor, angles: Angles, pool: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        query = self.layers[number].write_cache(x.flatten(0, 1), angles, pool, slots.flatten())
        return query.unflatten(0, x.shape[:2])


def last_seen_keys(positions: Tensor, config: BlockConfig) -> Tensor | None:
    """Return the position of the last key that each slot sees, int64 [B, S]; None: its own.

    Args:
        positions: int64 [B, S], of the slots; −1 is padding.
    """
    if config.is_causal:
        return None
    return positions.amax(1, keepdim=True).where(positions >= 0, -1)


class BlockDrafter(HeadDrafter):
    """Drafter of a block head. A K below the trained one shortens the block."""

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
        verified = without_padding(verified)
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
        first, start = self.head.config.first_slot, verified.positions[:, 0]
        num_slots = self.k + first
        start = start + (start >= 0)  # −1 remains padding
        columns = self._masked_columns(verified, start, num_slots)
        block = (
            last_rows(x, verified.counts, num_slots)
            for x in (columns.tokens, columns.positions, columns.slots)
        )
        return self.runner.run(*block, verified.block_table, self.pools)[:, first:]

    def _draw(self, outputs: Tensor, last: Tensor, verified: VerifiedFeatures) -> Proposal:
        """Draw the drafts of each slot in turn, from logits that may depend on the one before.

        Args:
            outputs: [B, K, H]. last: int64 [B], the positions before the blocks.
        """
        logits = self.runner.logits(outputs.transpose(0, 1))  # [K, B, W]
        previous = last_rows(verified.tokens, verified.counts)[:, 0]
        sampler = DraftSampler(self, last, verified.keys, logits)
        condition, confidence = self.conditioning(logits, outputs), None
        for slot in range(len(logits)):
            condition(slot, previous)
            if self.confidence and self.head.confidence_head is not None:
                confidence = self.runner.confidence(outputs[:, slot], previous)
            previous = sampler.draw(slot, logits[slot], confidence)
        return sampler.proposal()

    def conditioning(self, logits: Tensor, outputs: Tensor) -> Callable[[int, Tensor], None]:
        """Return a function that makes a slot's logits those given the tokens before it, in place.

        Args:
            logits: [K, B, W], of lm_head. outputs: [B, K, H].

        Returns:
            The function of the slot and of the tokens int64 [B]. Slots come in order.
        """

        def condition(slot: int, previous: Tensor) -> None:
            if self.head.markov_head is not None:
                self.runner.add_markov_bias_(logits[slot], previous)

        return condition


class SelectorDrafter(BlockDrafter):
    """Drafter of a head that chooses each draft among the most probable tokens (methods §7.5).

    A draft's distribution is the softmax of its slot's scores given the draft before it, and zero
    for all tokens but the candidates.
    """

    head: Dflash2Head
    fused_pass = FusedConvolvedBlock

    def conditioning(self, logits: Tensor, outputs: Tensor) -> Callable[[int, Tensor], None]:
        head, selector = self.head, self.head.candidate_selector
        products, candidates = logits.topk(selector.top_k, -1)
        values, successors = head.shaped(products), selector.successor_codebook(candidates)
        projected = selector.hidden_projection(head.normed(outputs.transpose(0, 1)))
        logits.fill_(never_drawn(logits.dtype))

        def condition(slot: int, previous: Tensor) -> None:
            context = selector.predecessor_codebook(previous) * projected[slot]
            scores = values[slot] + transition_scores(context, successors[slot])
            logits[slot].scatter_(-1, candidates[slot], scores)

        return condition
