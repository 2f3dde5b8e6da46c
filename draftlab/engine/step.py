"""One decode step, wholly on the device: verify, accept, show the drafter the truth, draft anew.

Nothing here waits for the host: shapes depend only on the number of rows, so on CUDA the step is
captured once per batch size and replayed (`GraphedStep`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.engine.drafter import Drafter, Observed, Proposal
from draftlab.engine.slots import Slots
from draftlab.kernels.rows import DraftDistribution
from draftlab.kernels.step_layout import StepLayout, advance, keep, lay_out
from draftlab.kernels.verify import Verdict, verify
from draftlab.target_model.fused_decoder import fused_decoder
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.prepacked_decoder import packed_decoder

Verifier = Callable[..., Verdict]


@dataclass(frozen=True)
class StepResult:
    """What the host must learn of a step, in one tensor, so that one copy brings it.

    Attributes:
        packed: int32 [B, 2K + 3] of `step_layout.pack`.
    """

    packed: Tensor

    @property
    def k(self) -> int:
        """Drafts a step."""
        return (self.packed.shape[1] - 3) // 2

    @property
    def tokens(self) -> Tensor:
        """int32 [B, K + 1]; of row b the first accepted[b] + 1 are emitted."""
        return self.packed[:, : self.k + 1]

    @property
    def accepted(self) -> Tensor:
        """int32 [B], drafts accepted."""
        return self.packed[:, self.k + 1]

    @property
    def num_drafts(self) -> Tensor:
        """int32 [B], drafts that were verified."""
        return self.packed[:, self.k + 2]

    @property
    def chance(self) -> Tensor:
        """float32 [B, K], expected acceptance of each draft given that it was reached."""
        return self.packed[:, self.k + 3 :].view(torch.float32)


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
        packed: on a CPU, run on weights packed for oneDNN where the target has that path.
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
        packed: bool = False,
    ) -> None:
        self.target, self.cache, self.slots, self.drafter = target, cache, slots, drafter
        self.decoder = fused_decoder(target) or (packed_decoder(target) if packed else None)
        self.decoder = self.decoder or target
        self.max_length, self.verifier, self.expect = max_length, verifier, expect
        self.k = drafter.k if drafter else 0
        self.boundaries = drafter.boundaries if drafter else ()

    @torch.inference_mode()
    def __call__(self, index: Tensor, *, limited: bool) -> StepResult:
        """Decodes one step of the slots `index` [B].

        Args:
            index: slot numbers; the dummy's entries compute nothing that anyone reads.
            limited: whether any of them samples with top-k or top-p.
        """
        slots, cache = self.slots, self.cache
        layout = lay_out(slots, index, max_length=self.max_length, block_size=cache.block_size)
        table, positions = layout.block_table, layout.positions
        states = self.decoder.states(
            layout.tokens,
            self.boundaries,
            positions=positions,
            cache=cache.at(table, positions, layout.slots),
        )
        verdict = self.verifier(
            self.decoder.logits(states.last),
            layout.tokens[:, 1:],
            layout.num_drafts,
            self._distribution(layout),
            layout.length,
            layout.keys,
            limited=limited,
            expect=self.expect,
        )
        outcome = advance(slots, layout, verdict)
        if self.drafter is not None:
            observed = Observed(
                outcome.tokens,
                states.features,
                outcome.positions,
                outcome.counts,
                table,
                layout.keys,
                layout.sampling,
            )
            self.keep(index, self.drafter.propose(observed))
        return StepResult(outcome.packed)

    def keep(self, index: Tensor, proposal: Proposal) -> None:
        """Stores the drafts of the slots `index` for their next step."""
        drawn_from = proposal.distribution
        if drawn_from is None:
            keep(self.slots, index, proposal.tokens)
        else:
            keep(self.slots, index, proposal.tokens, drawn_from.logits, drawn_from.log_sum)

    def _distribution(self, layout: StepLayout) -> DraftDistribution | None:
        slots = self.slots
        if (
            self.drafter is None
            or layout.sampling is None
            or slots.draft_logits is None
            or slots.draft_log_sum is None
        ):
            return None
        return DraftDistribution(
            slots.draft_logits,
            slots.draft_log_sum,
            *layout.sampling,
            self.drafter.draft_ids,
            self.drafter.draft_index,
            rows=layout.index,
        )


@dataclass
class _Graph:
    """A captured step, the tensor it reads its slots from, and the slots that lie there."""

    graph: torch.cuda.CUDAGraph
    index: Tensor
    result: StepResult
    slots: tuple[int, ...] = ()


class GraphedStep:
    """Replays the step from CUDA graphs, one for each batch size, all in one memory pool.

    A batch is rounded up to the next size of `SIZES`; the dummy slot fills it. Graphs are captured
    when they are first needed.
    """

    SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)

    def __init__(self, step: Step) -> None:
        self.step = step
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, slots: tuple[int, ...], *, limited: bool) -> StepResult:
        """Decodes one step of `slots`; the result is overwritten by the next step of its size."""
        size = next((s for s in self.SIZES if s >= len(slots)), len(slots))
        key = (size, limited)
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, limited)
        graph = self._graphs[key]
        if graph.slots != slots:
            graph.index.copy_(self.step.slots.index(slots, size))
            graph.slots = slots
        graph.graph.replay()
        return graph.result

    def _capture(self, size: int, limited: bool) -> _Graph:
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
        return _Graph(graph, index, result)
