"""One decode step on the device: gather the batch, verify, commit, extend the draft cache, propose.

Nothing here waits for the host: shapes depend only on the number of rows and on `StepShape`, so on
CUDA the step is captured once for each of these and replayed (`GraphedStep`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftlab.engine.base_drafter import Drafter, VerifiedFeatures
from draftlab.engine.draft_sampler import Proposal
from draftlab.engine.feature_backlog import FeatureBacklog
from draftlab.engine.input_batch import InputBatch
from draftlab.kernels.draft_allocation import allocate_drafts, compact_tokens, row_index
from draftlab.kernels.sampling_types import DraftDistribution, VerifyResult
from draftlab.kernels.step_layout import commit, gather_batch, store_drafts
from draftlab.kernels.step_types import StepLayout
from draftlab.kernels.verify import verify
from draftlab.target_model.fused_decoder import fused_decoder
from draftlab.target_model.model import DecodePath, Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.target_model.prepacked_decoder import prepacked_decoder

Verifier = Callable[..., VerifyResult]


@dataclass(frozen=True)
class StepShape:
    """The numbers of drafts that a step verifies and proposes.

    Attributes:
        k: most drafts that it verifies a row, and the number that it proposes; 0: the head does
            not run, and the features of the verified positions are kept for later.
        budget: drafts that it verifies in the whole batch, those of the largest survival; None:
            all that are stored.
    """

    k: int
    budget: int | None = None


class Step:
    """The decode step of an `Engine` (see there for the arguments).

    It reads and writes `input_batch`, and the target's KV cache `cache`.

    Attributes:
        scale, bias: float32 [K], the calibration of the drafts' confidence by depth, which a budget
            is allocated by; written in place while graphs hold them.
        backlog: features of verified positions that the draft model has not seen yet.
    """

    def __init__(
        self,
        target: Target,
        cache: PagedCache,
        input_batch: InputBatch,
        drafter: Drafter | None,
        *,
        max_length: int,
        verifier: Verifier = verify,
        expect: bool = True,
        cpu_prepacked: bool = False,
    ) -> None:
        self.target, self.cache, self.input_batch = target, cache, input_batch
        self.drafter = drafter
        prepacked = prepacked_decoder(target) if cpu_prepacked else None
        self.decoder: DecodePath = fused_decoder(target) or prepacked or target
        self.max_length, self.verifier, self.expect = max_length, verifier, expect
        self.block = drafter is not None and drafter.verification == "block"
        self.k = drafter.k if drafter else 0
        self.boundaries = drafter.boundaries if drafter else ()
        self.scale = torch.ones(self.k, device=target.device)
        self.bias = torch.zeros(self.k, device=target.device)
        self.backlog: FeatureBacklog | None = None

    @torch.inference_mode()
    def __call__(self, index: Tensor, *, limited: bool, shape: StepShape | None = None) -> Tensor:
        """Decode one step of the slots `index` [B]; return its packed results (`pack_results`).

        Args:
            index: slot numbers; results of the dummy are not read.
            limited: whether any of them samples with top-k or top-p.
            shape: None: `StepShape(self.k)`.
        """
        shape = shape or StepShape(self.k)
        # Gather the batch: each row's newest token and its drafts.
        layout = gather_batch(
            self.input_batch,
            index,
            max_length=self.max_length,
            block_size=self.cache.block_size,
            k=shape.k,
            num_drafts=self._allocate(index, shape),
        )
        features, logits, query_start = self._run_target(layout, shape)
        # Verify the drafts by rejection sampling.
        verified = self.verifier(
            logits,
            layout.tokens[:, 1:],
            layout.num_drafts,
            self._draft_distribution(layout, shape.k),
            layout.length,
            layout.keys,
            limited=limited,
            expect=self.expect,
            block=self.block,
            **({} if query_start is None else {"query_start": query_start}),
        )
        # Commit the accepted drafts and the token after them.
        output = commit(self.input_batch, layout, verified)
        if self.cache.states is not None:
            self.cache.states.keep(output.counts)
        if self.drafter is None:
            return output.packed_results
        if shape.k == 0:
            self.backlog.append(index, output.tokens, features, output.positions)
            return output.packed_results
        # Extend the draft model's cache by the verified features, and propose new drafts.
        pairs = VerifiedFeatures(
            output.tokens,
            features,
            output.positions,
            output.counts,
            layout.block_table,
            layout.keys,
            layout.sampling,
        )
        self.draft(index, pairs, shape.k)
        return output.packed_results

    def _allocate(self, index: Tensor, shape: StepShape) -> Tensor | None:
        """Return how many drafts of each row are verified, int64 [B]; None: all."""
        if shape.budget is None:
            return None
        return allocate_drafts(
            self.input_batch,
            index,
            self.scale,
            self.bias,
            budget=shape.budget,
            max_length=self.max_length,
            k=shape.k,
        )

    @property
    def compacts(self) -> bool:
        """True if a draft that is not verified costs the target nothing."""
        return getattr(self.decoder, "takes_compact_tokens", False) and self.cache.states is None

    def _run_target(
        self, layout: StepLayout, shape: StepShape
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return features [B, K + 1, F] and logits [B, K + 1, V].

        With a budget, and a decoder that takes compact tokens, the logits are [N, V], and the third
        result says where each row's begin, int64 [B].
        """
        table, positions = layout.block_table, layout.positions
        if shape.budget is None or not self.compacts:
            states = self.decoder.states(
                layout.tokens,
                self.boundaries,
                positions=positions,
                cache=self.cache.at(table, positions, layout.slots, layout.index),
            )
            return states.features, self.decoder.logits(states.last), None
        num_tokens = len(layout.index) + shape.budget
        compact = compact_tokens(layout, num_tokens)
        states = self.decoder.states(
            compact.tokens[None],
            self.boundaries,
            positions=compact.positions[None],
            cache=self.cache.at(
                table, positions, compact.slots, layout.index, query_start=compact.query_start
            ),
        )
        rows = row_index(compact.query_start, shape.k + 1, num_tokens)
        return states.features[0, rows], self.decoder.logits(states.last[0]), compact.query_start

    def draft(self, index: Tensor, verified: VerifiedFeatures, k: int) -> None:
        """Propose k drafts for the next step of the slots `index`, and store them."""
        fewer = {} if k == self.k else {"k": k}  # own drafters may know no other number
        self.store_drafts(index, self.drafter.propose(verified, **fewer))

    def begin_drafting(self, index: Tensor, verified: VerifiedFeatures, k: int) -> None:
        """Propose the first k drafts of prompts after their last pair; k = 0: only cache it."""
        if k == 0:
            self.drafter.extend_cache(verified)
        else:
            self.draft(index, verified, k)

    def store_drafts(self, index: Tensor, proposal: Proposal) -> None:
        """Store the drafts of the slots `index` for their next step."""
        q = proposal.distribution
        distribution = (None, None) if q is None else (q.logits, q.log_sum)
        store_drafts(self.input_batch, index, proposal.tokens, *distribution, proposal.confidence)

    def _draft_distribution(self, layout: StepLayout, k: int) -> DraftDistribution | None:
        """Return what the first k drafts were drawn from; None: all are argmaxes."""
        logits, log_sum = self.input_batch.draft_logits, self.input_batch.draft_log_sum
        if self.drafter is None or layout.sampling is None or logits is None or log_sum is None:
            return None
        drafter = self.drafter
        return DraftDistribution(
            logits[:, :k],
            log_sum[:, :k],
            *layout.sampling,
            drafter.draft_ids,
            drafter.draft_index,
            rows=layout.index,
        )


@dataclass
class _Graph:
    """A captured step, its input tensor of slots, and the slots that were last written there."""

    graph: torch.cuda.CUDAGraph
    index: Tensor
    result: Tensor
    slots: tuple[int, ...] = ()


class GraphedStep:
    """Replays the step from CUDA graphs, one for each batch size, all in one memory pool.

    A batch is padded with the dummy slot to `padded_size`. Graphs are captured on first use, one
    for each shape of a step.
    """

    SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    LARGE_MULTIPLE = 32

    @classmethod
    def padded_size(cls, count: int) -> int:
        """Return the batch size of the graph that decodes `count` requests."""
        multiple = -(-count // cls.LARGE_MULTIPLE) * cls.LARGE_MULTIPLE
        return next((size for size in cls.SIZES if size >= count), multiple)

    def __init__(self, step: Step) -> None:
        self.step = step
        self._graphs: dict[tuple[int, bool, StepShape | None], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, slots: tuple[int, ...], *, limited: bool, shape: StepShape | None = None
    ) -> Tensor:
        """Decode one step of `slots`; the next one of this size and shape overwrites the result."""
        size = self.padded_size(len(slots))
        key = (size, limited, shape)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph = self._graphs[key]
        if graph.slots != slots:
            graph.index.copy_(self.step.input_batch.index(slots, size))
            graph.slots = slots
        graph.graph.replay()
        return graph.result

    def _capture(self, size: int, limited: bool, shape: StepShape | None) -> _Graph:
        """Capture a step of `size` dummies, so that no request's state changes."""
        index = self.step.input_batch.index([], size)
        graph, result = self.capture(lambda: self.step(index, limited=limited, shape=shape))
        return _Graph(graph, index, result)

    def capture(self, run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph of a call, and the result that its replays write.

        It runs twice before, which compiles kernels and fills allocators.
        """
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()
        return graph, result
