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

import torch
from torch import Tensor

from draftlab.engine.base_drafter import Drafter, VerifiedFeatures
from draftlab.engine.generation_state import GenerationState, check_prompts
from draftlab.engine.sampling import Generation, Request, sampling_metadata
from draftlab.kernels.sampling import sample_token
from draftlab.kernels.sampling.types import DraftDistribution
from draftlab.kernels.verify import verify
from draftlab.target_model.hidden_states import HiddenStates
from draftlab.target_model.images import token_ids
from draftlab.target_model.model import Target


class _Row(GenerationState):
    """A request's state, its row of the caches, and its next drafts."""

    def __init__(self, request: Request, k: int, max_length: int, row: int) -> None:
        super().__init__(request, k, max_length)
        self.row, self.started = row, time.perf_counter()
        self.drafts: list[int] = []
        self.distribution: DraftDistribution | None = None  # of this row


class ReferenceEngine:
    """Decodes requests with a target and, when given, a drafter.

    The arguments are those of `Engine`; `batch` is the number of cache rows.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, batch: int, max_length: int
    ) -> None:
        self.target, self.drafter = target, drafter
        self.batch, self.max_length = batch, max_length
        self.k = drafter.k if drafter else 0
        self.boundaries = drafter.boundaries if drafter else ()
        self.cache = target.new_cache(batch, max_length)
        # Each row of the draft model's cache is one block; drafts reach up to K − 1 positions past
        # the last pair. Block 0 belongs to no row.
        if drafter:
            drafter.start(batch + 1, max_length + self.k, max_length=max_length)

    @torch.inference_mode()
    def generate(self, requests: Collection[Request]) -> Iterator[Generation]:
        """Yield each request's generation when it finishes.

        Raises:
            UserError: a prompt is empty or leaves no room for an answer.
        """
        check_prompts(requests, self.max_length)
        waiting, free = deque(requests), deque(range(self.batch))
        active: list[_Row] = []
        while waiting or active:
            count = min(len(free), len(waiting))
            admitted = [
                _Row(waiting.popleft(), self.k, self.max_length, free.popleft())
                for _ in range(count)
            ]
            for rows, run in ((admitted, self._prefill), (active, self._step)):
                if rows:
                    run(rows)
            for row in [row for row in (*active, *admitted) if row.finish]:
                free.append(row.row)
                yield row.result()
            active = [row for row in (*active, *admitted) if not row.finish]

    def _tensor(self, rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
        """Return int64 [B, longest], right-padded with `fill`."""
        width = max(len(row) for row in rows)
        padded = [[*row, *([fill] * (width - len(row)))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=self.target.device)

    def _vector(self, values: Sequence[int]) -> Tensor:
        """Return int64 [B]."""
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)

    def _run(self, rows: list[_Row], inputs: list[list[int]], starts: list[int]) -> HiddenStates:
        """Run each row's input tokens, which begin at position `starts`, through the target."""
        ends = [start + len(tokens) for start, tokens in zip(starts, inputs, strict=True)]
        positions = self._tensor([range(s, e) for s, e in zip(starts, ends, strict=True)], -1)
        cache = self.cache.at_rows([row.row for row in rows], positions, max(ends))
        return self.target.states(
            self._tensor(inputs), self.boundaries, positions=positions, cache=cache
        )

    def _prefill(self, rows: list[_Row]) -> None:
        """Run prompts, emit first tokens, and propose drafts."""
        states = self._run(rows, [row.tokens for row in rows], [0] * len(rows))
        lengths = self._vector([len(row.tokens) for row in rows])
        index = (lengths - 1)[:, None, None].expand(-1, 1, states.last.shape[-1])
        logits = self.target.logits(states.last.gather(1, index)[:, 0])
        metadata = sampling_metadata([row.request for row in rows], self.target.device)
        tokens = sample_token(logits, lengths, metadata).tolist()
        for row, token in zip(rows, tokens, strict=True):
            row.append_tokens([token])
            row.first_token_s = row.elapsed
        verified = [row.tokens[1:] for row in rows]
        self._propose(rows, states.features, verified, [0] * len(rows))

    def _step(self, rows: list[_Row]) -> None:
        """Verify each row's drafts, append, count, and propose."""
        # Gather the batch: each row's newest token and its drafts.
        inputs = [[row.tokens[-1], *row.drafts] for row in rows]
        starts = [len(row.tokens) - 1 for row in rows]
        states = self._run(rows, inputs, starts)
        # Verify the drafts by rejection sampling.
        width = states.last.shape[1] - 1
        result = verify(
            self.target.logits(states.last),
            self._tensor([tokens[1:] for tokens in inputs]),
            self._vector([len(row.drafts) for row in rows]),
            _stack([row.distribution for row in rows], width),
            self._vector([start + 1 for start in starts]),
            sampling_metadata([row.request for row in rows], self.target.device),
            block=self.drafter is not None and self.drafter.verification == "block",
        )
        # Commit the accepted drafts and the token after them.
        results = (x.tolist() for x in (result.accepted, result.emitted, result.probability))
        verified = []
        for row, accepted, token, probability in zip(rows, *results, strict=True):
            row.count_step(len(row.drafts), accepted, probability)
            verified.append([*row.drafts[:accepted], token])
            row.append_tokens(verified[-1])
        self._propose(rows, states.features, verified, starts)

    def _propose(
        self,
        rows: list[_Row],
        features: Tensor,
        tokens: list[list[int]],
        starts: list[int],
    ) -> None:
        """Propose drafts for the rows that continue.

        Args:
            features, tokens: the rows' new pairs (x_{p+1}, g_p), from positions `starts` on.
        """
        active = [i for i, row in enumerate(rows) if not row.finish]
        if self.drafter is None or not active:
            return
        counts = [len(tokens[i]) for i in active]
        ends = [starts[i] + count for i, count in zip(active, counts, strict=True)]
        proposal = self.drafter.propose(
            VerifiedFeatures(
                token_ids(self.target, self._tensor([tokens[i] for i in active])),
                features[self._vector(active), : max(counts)],
                self._tensor([range(starts[i], e) for i, e in zip(active, ends, strict=True)], -1),
                self._vector(counts),
                self._vector([rows[i].row + 1 for i in active])[:, None].int(),
                sampling_metadata([rows[i].request for i in active], self.target.device),
            )
        )
        for n, (i, drafts) in enumerate(zip(active, proposal.tokens.tolist(), strict=True)):
            # Draft d has position len(tokens) + d, and the token after the last draft must fit too,
            # as in vLLM's scheduler (docs/benchmarks.md).
            row, q = rows[i], proposal.distribution
            row.drafts = drafts[: max(min(self.k, self.max_length - len(row.tokens) - 1), 0)]
            row.distribution = None if q is None else q[n : n + 1]


def _stack(single: list[DraftDistribution | None], width: int) -> DraftDistribution | None:
    """Return the rows' draft distributions as one, cut to `width` drafts; None if there are none:
    all drafts are argmaxes.
    """
    rows = [q for q in single if q is not None]
    if not rows or width == 0:
        return None
    if len(rows) < len(single):
        raise ValueError(f"expected draft distributions of all {len(single)} rows or of none")
    return DraftDistribution(
        torch.cat([q.logits[:, :width] for q in rows]),
        torch.cat([q.log_sum[:, :width] for q in rows]),
        torch.cat([q.temperature for q in rows]),
        rows[0].ids,
        rows[0].index,
    )
