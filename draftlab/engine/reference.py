"""The reference engine: prefill, propose, verify, count; prompts join and leave.

It decodes the same as `engine/engine.py`, eagerly and one decision at a time. Every row of the
cache serves one request. A step feeds each active row its newest token and its drafts, lets the
target judge them, emits what survives, and shows the drafter the true features of what was
accepted. It is written to be read: the host decides, and every decision can be printed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftlab.engine.drafter import Drafter, Observed
from draftlab.engine.generation_state import Progress, check_prompts
from draftlab.engine.sampling import Generation, Request, row_keys
from draftlab.kernels.rows import DraftDistribution
from draftlab.kernels.verify import sample_first, verify
from draftlab.target_model.model import Target


class _Row(Progress):
    """A request's progress and its next drafts."""

    def __init__(self, request: Request, k: int) -> None:
        super().__init__(request, k)
        self.started = time.perf_counter()
        self.drafts: list[int] = []
        self.drawn_from: DraftDistribution | None = None  # of this row alone; None: argmax drafts


class ReferenceEngine:
    """Decodes requests with a target and, when given, a drafter.

    Args:
        target: the model whose distribution is kept.
        drafter: what proposes; None decodes plainly.
        batch: rows decoded at once.
        max_length: positions a row may take (prompt and answer); drafts are capped near it.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, batch: int, max_length: int
    ) -> None:
        self.target, self.drafter = target, drafter
        self.batch, self.max_length = batch, max_length
        self.k = drafter.k if drafter else 0
        self.boundaries = drafter.boundaries if drafter else ()
        self.cache = target.new_cache(batch, max_length)
        # Row r of the head's cache is one block; drafts reach up to K − 1 positions past the last
        # pair. Block 0 is nobody's.
        self.blocks = list(range(1, batch + 1))
        if drafter:
            drafter.start(batch + 1, max_length + self.k, max_length=max_length)

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yields each request's result as it finishes.

        Raises:
            UserError: for an empty prompt, or one that leaves no room for an answer.
        """
        check_prompts(requests, self.max_length)
        waiting = deque(requests)
        active: list[_Row] = []  # active[i] has cache row i
        while waiting or active:
            if waiting and len(active) < self.batch:
                joining = [waiting.popleft() for _ in range(self.batch - len(active)) if waiting]
                joined = self._prefill(joining, len(active))
                active += [row for row in joined if not row.finish]
                yield from (row.result() for row in joined if row.finish)
            if active:
                stepped = self._step(active)
                active = [row for row in stepped if not row.finish]
                yield from (row.result() for row in stepped if row.finish)

    def _tensor(self, rows: Sequence[Sequence[int]], fill: int) -> Tensor:
        """int64 [B, longest], right-padded with `fill`."""
        width = max(len(row) for row in rows)
        padded = [[*row, *([fill] * (width - len(row)))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.target.device)

    def _prefill(self, requests: list[Request], start: int) -> list[_Row]:
        """Runs prompts in cache rows from `start`, emits first tokens, drafts.

        Returns:
            The rows: those that go on first, in the order of their cache rows.
        """
        rows = [_Row(request, self.k) for request in requests]
        lengths = self._tensor([[len(row.tokens)] for row in rows], 0)[:, 0]
        positions = self._tensor([range(len(row.tokens)) for row in rows], -1)
        states = self.target.states(
            self._tensor([row.tokens for row in rows], 0),
            self.boundaries,
            positions=positions,
            cache=self.cache.at(start, positions, positions.shape[1]),
        )
        newest = states.last.gather(
            1, (lengths - 1)[:, None, None].expand(-1, 1, states.last.shape[-1])
        )[:, 0]
        keys = row_keys(requests, self.target.device)
        tokens = sample_first(self.target.logits(newest), lengths, keys).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.emit([token], self.max_length)
            row.first_token_s = row.elapsed
        shown = [row.tokens[1:] for row in rows]
        return self._draft(rows, start, states.features, shown, positions)

    def _step(self, rows: list[_Row]) -> list[_Row]:
        """Verifies each row's drafts, emits, counts, drafts anew; returns as `_prefill` does."""
        fed = [[row.tokens[-1], *row.drafts] for row in rows]
        starts = [len(row.tokens) - 1 for row in rows]
        positions = self._tensor(
            [range(s, s + len(f)) for s, f in zip(starts, fed, strict=True)], -1
        )
        visible = max(s + len(f) for s, f in zip(starts, fed, strict=True))
        states = self.target.states(
            self._tensor(fed, 0),
            self.boundaries,
            positions=positions,
            cache=self.cache.at(0, positions, visible),
        )
        width = positions.shape[1] - 1
        verdict = verify(
            self.target.logits(states.last),
            self._tensor([f[1:] for f in fed], 0) if width else positions[:, :0],
            self._tensor([[len(row.drafts)] for row in rows], 0)[:, 0],
            _stack([row.drawn_from for row in rows], width),
            self._tensor([[s + 1] for s in starts], 0)[:, 0],
            row_keys([row.request for row in rows], self.target.device),
        )
        accepted, emitted = verdict.accepted.tolist(), verdict.emitted.tolist()
        probability = verdict.probability.tolist()
        tokens = []
        for row, count, token, chance in zip(rows, accepted, emitted, probability, strict=True):
            row.count(len(row.drafts), count, chance)
            tokens.append([*row.drafts[:count], token])
            row.emit(tokens[-1], self.max_length)
        kept = self._tensor([range(s, s + len(t)) for s, t in zip(starts, tokens, strict=True)], -1)
        return self._draft(rows, 0, states.features[:, : kept.shape[1]], tokens, kept)

    def _draft(
        self,
        rows: list[_Row],
        start: int,
        features: Tensor,
        tokens: Sequence[Sequence[int]],
        positions: Tensor,
    ) -> list[_Row]:
        """Closes the gaps that finished rows leave, then drafts for the rows that go on.

        Args:
            rows: with cache rows start, start + 1, …
            features, tokens, positions: their new pairs (x_{p+1}, g_p), padded by position −1.

        Returns:
            The rows that go on, in the order of their cache rows, then the finished ones.
        """
        order = list(range(len(rows)))
        going = sum(not row.finish for row in rows)
        gaps = [i for i in range(going) if rows[i].finish]
        late = [i for i in range(going, len(rows)) if not rows[i].finish]
        for gap, source in zip(gaps, late, strict=True):
            self.cache.move(start + source, start + gap)
            blocks = self.blocks
            at, source_at = start + gap, start + source
            blocks[at], blocks[source_at] = blocks[source_at], blocks[at]
            order[gap], order[source] = order[source], order[gap]
        placed = [rows[i] for i in order]
        if self.drafter is None or going == 0:
            return placed
        order = order[:going]
        counts = [len(tokens[i]) for i in order]
        width = max(counts)
        select = torch.tensor(order, device=positions.device)
        proposal = self.drafter.propose(
            Observed(
                self._tensor([tokens[i] for i in order], 0),
                features[select, :width],
                positions[select, :width],
                self._tensor([[count] for count in counts], 0)[:, 0],
                self._tensor([[b] for b in self.blocks[start : start + going]], 0).int(),
                row_keys([row.request for row in placed[:going]], positions.device),
            )
        )
        for i, (row, drafts) in enumerate(zip(placed, proposal.tokens.tolist(), strict=False)):
            # Draft d is fed at position len(tokens) + d and the token after the last draft must fit
            # too: the limit vLLM's scheduler keeps (docs/benchmarks.md).
            room = max(min(self.k, self.max_length - len(row.tokens) - 1), 0)
            row.drafts = drafts[:room]
            drawn_from = proposal.distribution
            row.drawn_from = drawn_from[i : i + 1] if drawn_from is not None else None
        return placed


def _stack(single: list[DraftDistribution | None], width: int) -> DraftDistribution | None:
    """The rows' draft distributions as one, cut to `width` drafts; None when no row has any.

    A row without one has argmax drafts.
    """
    known = next((q for q in single if q is not None), None)
    if known is None or width == 0:
        return None
    blank = replace(known, sampled=torch.zeros_like(known.sampled))
    rows = [blank if q is None else q for q in single]
    return DraftDistribution(
        torch.cat([q.logits[:, :width] for q in rows]),
        torch.cat([q.log_sum[:, :width] for q in rows]),
        torch.cat([q.temperature for q in rows]),
        torch.cat([q.sampled for q in rows]),
        known.ids,
        known.index,
    )
