"""One decode step, wholly on the device: verify, accept, show the drafter the truth, draft anew.

Nothing here waits for the host: shapes depend only on the number of rows, so on CUDA the step is
captured once per batch size and replayed (`GraphedStep`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.decode.drafter import Drafter, Observed, Proposal
from draftlab.decode.slots import Slots
from draftlab.kernels.verify import DraftDistribution, Verdict, verify
from draftlab.target.fused import fused_decoder
from draftlab.target.model import Target
from draftlab.target.paged import PagedCache, slot_mapping

Verifier = Callable[..., Verdict]


@dataclass(frozen=True)
class StepResult:
    """What the host must learn of a step.

    Attributes:
        tokens: int64 [B, K + 1]; of row b the first accepted[b] + 1 are emitted.
        accepted: int64 [B], drafts accepted.
        num_drafts: int64 [B], drafts that were verified.
        chance: float32 [B, K], expected acceptance of each draft given that it was reached.
    """

    tokens: Tensor
    accepted: Tensor
    num_drafts: Tensor
    chance: Tensor


class Step:
    """The step of an engine: a function of `Slots`, which it reads and writes.

    Args:
        target: the model whose distribution is kept.
        cache: its keys and values.
        slots: the requests' state.
        drafter: what proposes; None decodes plainly.
        max_length: positions a row may take; drafts are capped near it.
        verifier: decides what is accepted, with the signature of `kernels.verify.verify`.
        expect: also compute Σ min(p, q) where drafts were sampled.
    """

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        slots: Slots,
        drafter: Drafter | None,
        *,
        max_length: int,
        verifier: Verifier = verify,
        expect: bool = True,
    ) -> None:
        self.target, self.cache, self.slots, self.drafter = target, cache, slots, drafter
        self.decoder = fused_decoder(target) or target
        self.max_length, self.verifier, self.expect = max_length, verifier, expect
        self.k = drafter.k if drafter else 0
        self.boundaries = drafter.boundaries if drafter else ()
        self.depth = torch.arange(self.k + 1, device=target.device)

    @torch.inference_mode()
    def __call__(self, index: Tensor, *, limited: bool) -> StepResult:
        """Decodes one step of the slots `index` [B].

        Args:
            index: slot numbers; the dummy's entries compute nothing that anyone reads.
            limited: whether any of them samples with top-k or top-p.
        """
        slots, depth = self.slots, self.depth
        length, drafts = slots.length[index], slots.drafts[index]
        live = length > 0
        # Draft d is fed at position length + d, and the token after the last draft must fit too:
        # the limit vLLM's scheduler keeps (docs/results/parity.md).
        num_drafts = (self.max_length - 1 - length).clamp(0, self.k).where(live, 0)
        real = (depth <= num_drafts[:, None]) & live[:, None]
        positions = (length[:, None] - 1 + depth).where(real, -1)
        table = slots.block_table[index]
        tokens = torch.cat([slots.newest[index, None], drafts], 1)
        states = self.decoder.states(
            tokens,
            self.boundaries,
            positions=positions,
            cache=self.cache.at(
                table, positions, slot_mapping(table, positions, self.cache.block_size)
            ),
        )
        keys = slots.keys[index]
        verdict = self.verifier(
            self.decoder.logits(states.last),
            drafts,
            num_drafts,
            self._distribution(index),
            length,
            keys,
            limited=limited,
            expect=self.expect,
        )
        accepted = verdict.accepted
        # drafts shifted into place, the emitted token behind the accepted ones
        emitted = torch.cat([drafts, drafts.new_zeros(len(drafts), 1)], 1)
        emitted = emitted.scatter(1, accepted[:, None], verdict.emitted[:, None])
        slots.length[index] = (length + accepted + 1).where(live, 0)
        slots.newest[index] = verdict.emitted
        if self.drafter is not None:
            kept = (depth <= accepted[:, None]) & live[:, None]
            observed = Observed(
                emitted, states.features, positions.where(kept, -1), accepted + 1, table, keys
            )
            self.keep(index, self.drafter.propose(observed))
        return StepResult(emitted, accepted, num_drafts, verdict.probability)

    def keep(self, index: Tensor, proposal: Proposal) -> None:
        """Stores the drafts of the slots `index` for their next step."""
        slots = self.slots
        slots.drafts[index] = proposal.tokens
        if proposal.distribution is not None:
            slots.draft_logits[index] = proposal.distribution.logits
            slots.draft_log_sum[index] = proposal.distribution.log_sum

    def _distribution(self, index: Tensor) -> DraftDistribution | None:
        slots = self.slots
        if self.drafter is None or slots.draft_logits is None:
            return None
        temperature, sampled = self.drafter.sampling(slots.keys[index])
        return DraftDistribution(
            slots.draft_logits[index],
            slots.draft_log_sum[index],
            temperature,
            sampled,
            self.drafter.draft_ids,
            self.drafter.draft_index,
        )


class GraphedStep:
    """Replays the step from CUDA graphs, one for each batch size, all in one memory pool.

    A batch is rounded up to the next size of `SIZES`; the dummy slot fills it. Graphs are captured
    when they are first needed.
    """

    SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)

    def __init__(self, step: Step) -> None:
        self.step = step
        self._graphs: dict[tuple[int, bool], tuple[torch.cuda.CUDAGraph, Tensor, StepResult]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, slots: tuple[int, ...], *, limited: bool) -> StepResult:
        """Decodes one step of `slots`; the result is overwritten by the next step of its size."""
        size = next((s for s in self.SIZES if s >= len(slots)), len(slots))
        key = (size, limited)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, limited)
        graph, index, result = self._graphs[key]
        index.copy_(self.step.slots.index(slots, size), non_blocking=True)
        graph.replay()
        return result

    def _capture(self, size: int, limited: bool) -> tuple[torch.cuda.CUDAGraph, Tensor, StepResult]:
        # Warm-up and capture see only the dummy, so no request's state changes.
        index = self.step.slots.index([], size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and fills allocators
                self.step(index, limited=limited)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = self.step(index, limited=limited)
        return graph, index, result
