"""The drafter of heads that choose each draft among the most probable tokens (methods §7.5)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from draftlab.engine.block_drafter import BlockDrafter, EagerBlock, FusedBlock
from draftlab.heads.dflash2 import Dflash2Head, never_drawn, transition_scores
from draftlab.heads.layers import Angles


class FusedConvolvedBlock(FusedBlock):
    """The passes of `FusedBlock`, with the head's own convolutions between them."""

    run = EagerBlock.run

    def write_cache(
        self, number: int, x: Tensor, angles: Angles, pool: tuple[Tensor, Tensor], slots: Tensor
    ) -> Tensor:
        query = self.layers[number].write_cache(x.flatten(0, 1), angles, pool, slots.flatten())
        return query.unflatten(0, x.shape[:2])


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
