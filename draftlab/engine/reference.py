"""The reference engine: speculative decoding written to be read, one decision at a time.

It emits the same tokens as `engine/engine.py`, eagerly. Every row of the cache serves one request.
A step gives each row's newest token and drafts to the target, verifies the drafts by rejection
sampling, appends the emitted tokens, extends the draft model's cache by the features of the
accepted ones, and proposes new drafts. The host makes every decision, so all can be printed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftlab.engine.drafter import HeadDrafter, VerifiedFeatures
from draftlab.engine.generation_state import GenerationState, check_prompts
from draftlab.engine.sampling import Generation, Request, sampling_metadata
from draftlab.kernels.sampling import sample_token
from draftlab.kernels.sampling_types import DraftDistribution
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target


class _Row(GenerationState):
    """A request's state and its next drafts."""

    def __init__(self, request: Request, k: int) -> None:
        super().__init__(request, k)
        self.started = time.perf_counter()
        self.drafts: list[int] = []
        self.distribution: DraftDistribution | None = None  # of this row; None: argmax drafts


class ReferenceEngine:
    """Decodes requests with a target and, when given, a drafter.

    The arguments are those of `Engine`; `batch` is the number of cache rows.
    """

    def __init__(
        self, target: Target, drafter: HeadDrafter | None = None, *, batch: int, max_length: int
    ) -> None:
        self.target, self.drafter = target, drafter
        self.batch, self.max_length = batch, max_length
        self.k = drafter.k if drafter else 0
        self.boundaries = drafter.boundaries if drafter else ()
        self.cache = target.new_cache(batch, max_length)
        # Each row of the draft model's cache is one block; drafts reach up to K − 1 positions past
        # the last pair. Block 0 belongs to no row.
        self.blocks = list(range(1, batch + 1))
        if drafter:
            drafter.start(batch + 1, max_length + self.k, max_length=max_length)

    @torch.inference_mode()
    def generate(self, requests: Collection[Request]) -> Iterator[Generation]:
        """Yield each request's generation when it finishes.

        Raises:
            UserError: a prompt is empty or leaves no room for an answer.
        """
        check_prompts(requests, self.max_length)
        waiting = deque(requests)
        active: list[_Row] = []  # active[i] has cache row i
        while waiting or active:
            if waiting and len(active) < self.batch:
                count = min(self.batch - len(active), len(waiting))
                admitted = [waiting.popleft() for _ in range(count)]
                rows = self._prefill(admitted, len(active))
                active += [row for row in rows if not row.finish]
                yield from (row.result() for row in rows if row.finish)
            if active:
                rows = self._step(active)
                active = [row for row in rows if not row.finish]
                yield from (row.result() for row in rows if row.finish)

    def _tensor(self, rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
        """Return int64 [B, longest], right-padded with `fill`."""
        width = max(len(row) for row in rows)
        padded = [[*row, *([fill] * (width - len(row)))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.target.device)

    def _vector(self, values: Sequence[int]) -> Tensor:
        """Return int64 [B]."""
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)

    def _prefill(self, requests: list[Request], start: int) -> list[_Row]:
        """Run prompts in cache rows from `start`, emit first tokens, and propose drafts.

        Returns:
            The rows: first those that continue, in the order of their cache rows.
        """
        rows = [_Row(request, self.k) for request in requests]
        lengths = self._vector([len(row.tokens) for row in rows])
        positions = self._tensor([range(len(row.tokens)) for row in rows], -1)
        states = self.target.states(
            self._tensor([row.tokens for row in rows]),
            self.boundaries,
            positions=positions,
            cache=self.cache.at(start, positions, positions.shape[1]),
        )
        index = (lengths - 1)[:, None, None].expand(-1, 1, states.last.shape[-1])
        logits = self.target.logits(states.last.gather(1, index)[:, 0])
        metadata = sampling_metadata(requests, self.target.device)
        tokens = sample_token(logits, lengths, metadata).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.append_tokens([token], self.max_length)
            row.first_token_s = row.elapsed
        verified = [row.tokens[1:] for row in rows]
        return self._propose(rows, start, states.features, verified, positions)

    def _step(self, rows: list[_Row]) -> list[_Row]:
        """Verify each row's drafts, append, count, and propose; return rows as `_prefill` does."""
        # Gather the batch: each row's newest token and its drafts.
        inputs = [[row.tokens[-1], *row.drafts] for row in rows]
        starts = [len(row.tokens) - 1 for row in rows]
        ends = [start + len(tokens) for start, tokens in zip(starts, inputs, strict=True)]
        positions = self._tensor([range(s, e) for s, e in zip(starts, ends, strict=True)], -1)
        states = self.target.states(
            self._tensor(inputs),
            self.boundaries,
            positions=positions,
            cache=self.cache.at(0, positions, max(ends)),
        )
        # Verify the drafts by rejection sampling.
        width = positions.shape[1] - 1
        result = verify(
            self.target.logits(states.last),
            self._tensor([tokens[1:] for tokens in inputs]) if width else positions[:, :0],
            self._vector([len(row.drafts) for row in rows]),
            _stack([row.distribution for row in rows], width),
            self._vector([start + 1 for start in starts]),
            sampling_metadata([row.request for row in rows], self.target.device),
        )
        # Commit the accepted drafts and the token after them.
        results = (x.tolist() for x in (result.accepted, result.emitted, result.probability))
        verified = []
        for row, accepted, token, probability in zip(rows, *results, strict=True):
            row.count_step(len(row.drafts), accepted, probability)
            verified.append([*row.drafts[:accepted], token])
            row.append_tokens(verified[-1], self.max_length)
        ends = [start + len(tokens) for start, tokens in zip(starts, verified, strict=True)]
        positions = self._tensor([range(s, e) for s, e in zip(starts, ends, strict=True)], -1)
        features = states.features[:, : positions.shape[1]]
        return self._propose(rows, 0, features, verified, positions)

    def _propose(
        self,
        rows: list[_Row],
        start: int,
        features: Tensor,
        tokens: Sequence[Sequence[int]],
        positions: Tensor,
    ) -> list[_Row]:
        """Close the gaps of finished rows, then propose drafts for the rows that continue.

        Args:
            rows: rows with cache rows start, start + 1, …
            features, tokens, positions: their new pairs (x_{p+1}, g_p), padded by position −1.

        Returns:
            The rows that continue, in the order of their cache rows, then the finished ones.
        """
        order = self._close_gaps(rows, start)
        ordered = [rows[i] for i in order]
        active = [row for row in ordered if not row.finish]
        if self.drafter is None or not active:
            return ordered
        order = order[: len(active)]
        counts = [len(tokens[i]) for i in order]
        select, width = self._vector(order), max(counts)
        blocks = self._vector(self.blocks[start : start + len(active)])
        proposal = self.drafter.propose(
            VerifiedFeatures(
                self._tensor([tokens[i] for i in order]),
                features[select, :width],
                positions[select, :width],
                self._vector(counts),
                blocks[:, None].int(),
                sampling_metadata([row.request for row in active], self.target.device),
            )
        )
        for i, (row, drafts) in enumerate(zip(active, proposal.tokens.tolist(), strict=True)):
            # Draft d has position len(tokens) + d, and the token after the last draft must fit too,
            # as in vLLM's scheduler (docs/benchmarks.md).
            room = max(min(self.k, self.max_length - len(row.tokens) - 1), 0)
            row.drafts = drafts[:room]
            q = proposal.distribution
            row.distribution = None if q is None else q[i : i + 1]
        return ordered

    def _close_gaps(self, rows: list[_Row], start: int) -> list[int]:
        """Move the last continuing rows into cache rows of finished ones; return the new order."""
        order = list(range(len(rows)))
        num_active = sum(not row.finish for row in rows)
        gaps = [i for i in range(num_active) if rows[i].finish]
        movable = [i for i in range(num_active, len(rows)) if not rows[i].finish]
        for gap, source in zip(gaps, movable, strict=True):
            to_row, from_row = start + gap, start + source
            self.cache.move(from_row, to_row)
            blocks = self.blocks
            blocks[to_row], blocks[from_row] = blocks[from_row], blocks[to_row]
            order[gap], order[source] = order[source], order[gap]
        return order


def _stack(single: list[DraftDistribution | None], width: int) -> DraftDistribution | None:
    """Return the rows' draft distributions as one, cut to `width` drafts; None if there are none.

    A row without a distribution has argmax drafts.
    """
    template = next((q for q in single if q is not None), None)
    if template is None or width == 0:
        return None
    argmax = replace(template, sampled=torch.zeros_like(template.sampled))
    rows = [argmax if q is None else q for q in single]
    return DraftDistribution(
        torch.cat([q.logits[:, :width] for q in rows]),
        torch.cat([q.log_sum[:, :width] for q in rows]),
        torch.cat([q.temperature for q in rows]),
        torch.cat([q.sampled for q in rows]),
        template.ids,
        template.index,
    )
