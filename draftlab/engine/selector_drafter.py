"""The drafter of heads that choose each draft among the most probable tokens (methods §7.5)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from draftlab.engine.block_drafter import BlockDrafter, FusedBlock, last_seen_keys
from draftlab.engine.head_pass import Pools
from draftlab.heads.dflash2 import Dflash2Head, never_drawn, transition_scores
from draftlab.kernels.paged_attention import attend_paged


class FusedConvolvedBlock(FusedBlock):
    """The passes of `FusedBlock`, with the head's own convolutions between them."""

    def run(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, pools: Pools
    ) -> Tensor:
        shape, slots, angles = tokens.shape, slots.flatten(), self._angles(positions)
        hidden = F.embedding(tokens, self.embeddings)
        seen = last_seen_keys(positions, self.head.config)
        for module, layer, pool in zip(self.head.layers, self.layers, pools, strict=True):
            x, finish = module.begin(hidden)
            query = layer.write_cache(x.flatten(0, 1), angles, pool, slots)
            options = {"scale": layer.scale, "window": layer.window, "last_seen": seen}
            query = query.unflatten(0, shape)
            hidden = finish(attend_paged(query, *pool, block_table, positions, **options))
        return hidden


class SelectorDrafter(BlockDrafter):
    """Drafter of a DFlash2 head.

    A draft's distribution is the softmax of its slot's scores given the draft before it, and zero
    for all tokens but the candidates.

    Args: those of `HeadDrafter`.
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
