"""The engine: requests in, generations out; the device works ahead, the host keeps the books.

    admit ─► prefill ─► step ─► step ─► …        (device, in stream order)
                 └─ results ─► emit tokens, count, finish, free blocks        (host)

Every request holds a slot and blocks of the key-value pool. On CUDA a step is one replayed graph,
and the host reads the results of step n while step n + 1 runs; a request whose end the host has not
seen yet takes part in one step more, whose result is dropped. When the pool runs dry the request
that joined last gives its blocks back and is computed again later: noise is keyed by request and
position, so its drafts and tokens come out the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from draftlab.engine.block_pool import BlockPool
from draftlab.engine.drafter import Drafter
from draftlab.engine.generation_state import check_prompts
from draftlab.engine.prefill import prefill
from draftlab.engine.sampling import Generation, Request
from draftlab.engine.sequence import Job
from draftlab.engine.slots import Slots
from draftlab.engine.step import GraphedStep, Step, StepResult, Verifier
from draftlab.errors import UserError
from draftlab.kernels.current import made_current
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target
from draftlab.target_model.probe import can_capture


@dataclass(frozen=True)
class _InFlight:
    """A step whose results are on their way to the host."""

    jobs: tuple[tuple[Job, int], ...]  # with the number of the residence they were launched in
    result: StepResult
    ready: torch.cuda.Event | None


class Engine:
    """Decodes requests with a target and, when given, a drafter.

    Args:
        target: the model whose distribution is kept.
        drafter: what proposes; None decodes plainly.
        batch: requests decoded at once.
        max_length: positions a row may take (prompt and answer); drafts are capped near it.
        block_size: positions in a block of the pool; None: 64 on a GPU, on a CPU one block a row
            (keys then lie in one piece).
        num_blocks: blocks in the pool; None: enough for every row, as far as memory goes.
        prefill_tokens: prompt tokens in a forward pass.
        verifier: decides what is accepted, with the signature of `kernels.verify.verify`.
        expect: also compute the expected acceptance of sampled drafts.
        graphs: replay CUDA graphs; None: on a GPU.
        packed: on a CPU, run on weights packed for oneDNN where the target has that path
            (`target_model/prepacked_decoder.py`): faster, and other in the last bits. Without
            effect on a GPU.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        batch: int,
        max_length: int,
        block_size: int | None = None,
        num_blocks: int | None = None,
        prefill_tokens: int = 2048,
        verifier: Verifier = verify,
        expect: bool = True,
        graphs: bool | None = None,
        packed: bool = False,
    ) -> None:
        self.target, self.drafter, self.max_length = target, drafter, max_length
        self.k = drafter.k if drafter else 0
        on_gpu = target.device.type == "cuda"
        block_size = block_size or (64 if on_gpu else max_length)
        width = -(-max_length // block_size)
        self.pool = BlockPool(num_blocks or batch * width, block_size)
        if self.pool.num_blocks < width:
            raise UserError(
                f"expected a pool of at least {width} blocks of {block_size} positions, one row of "
                f"{max_length}; found {self.pool.num_blocks}",
                do="give the engine more blocks or a shorter max_length",
            )
        self.cache = target.new_paged_cache(self.pool.num_blocks + 1, block_size)
        if drafter:
            blocks = self.pool.num_blocks + 1
            drafter.start(blocks, block_size, max_length=max_length, packed=packed)
        self.slots = Slots(
            batch,
            self.k,
            width,
            target.device,
            draft_vocab=drafter.draft_vocab if drafter else None,
            sampling=drafter.sampling if drafter else None,
        )
        self.step = Step(
            target,
            self.cache,
            self.slots,
            drafter,
            max_length=max_length,
            verifier=verifier,
            expect=expect,
            packed=packed,
        )
        self.prefill_tokens = prefill_tokens
        graphed = can_capture(target) if graphs is None else graphs
        self.graphs = GraphedStep(self.step) if graphed else None
        # How many steps the device may be ahead of the host's books.
        self.lead = 1 if on_gpu else 0

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yields each request's result as it finishes.

        Raises:
            UserError: for an empty prompt, or one that leaves no room for an answer.
        """
        check_prompts(requests, self.max_length)
        waiting = deque(Job(request, self.k) for request in requests)
        free = list(range(self.slots.num_slots - 1, -1, -1))
        active: list[Job] = []  # in the order of joining
        flying: deque[_InFlight] = deque()
        collect = partial(self._collect, flying, active, free)
        while waiting or active or flying:
            joining = self._admit(waiting, free)
            if joining:
                active += joining
                with made_current(self.target.device):
                    flying.append(self._prefill(joining))
                yield from collect(self.lead)
            if active:
                while not self._make_room(active, len(flying)):
                    if flying:  # the books first: some may have finished
                        yield from collect(0)
                    else:
                        waiting.appendleft(self._evict(active, free))
            if active:
                with made_current(self.target.device):
                    flying.append(self._step(sorted(active, key=lambda job: job.slot)))
            yield from collect(self.lead if active else 0)

    def _admit(self, waiting: deque[Job], free: list[int]) -> list[Job]:
        """Gives slots and blocks to those who come first, as long as there are any."""
        joining: list[Job] = []
        while waiting and free and self._grow(waiting[0], 0):
            job = waiting.popleft()
            job.join(free.pop())
            joining.append(job)
        return joining

    def _grow(self, job: Job, steps_ahead: int) -> bool:
        """Blocks for the coming step: the tokens known by then, and drafts of two steps."""
        known = len(job.tokens) + steps_ahead * (self.k + 1)
        return self.pool.grow(job.blocks, min(known + 1 + 2 * self.k, self.max_length))

    def _make_room(self, active: list[Job], steps_ahead: int) -> bool:
        """Whether every active request has blocks for its next step."""
        for job in active:
            owned = len(job.blocks)
            if not self._grow(job, steps_ahead):
                return False
            if len(job.blocks) > owned:
                self.slots.own(job.slot, job.blocks)
        return True

    def _evict(self, active: list[Job], free: list[int]) -> Job:
        """Takes slot and blocks from the request that joined last."""
        job = active.pop()
        self._leave(job, free)
        return job

    def _leave(self, job: Job, free: list[int]) -> None:
        # What is in flight still writes to its blocks, before whoever gets them next.
        self.pool.release(job.blocks)
        free.append(job.slot)
        job.leave()

    def _prefill(self, jobs: list[Job]) -> _InFlight:
        index = self.slots.index([job.slot for job in jobs])
        self.slots.admit(index, [job.request for job in jobs])
        for job in jobs:
            self.slots.own(job.slot, job.blocks)
        result, observed = prefill(self.step, jobs, index, self.prefill_tokens)
        sent = self._send(jobs, result)  # first tokens wait for no drafts
        if observed is not None:
            self.step.keep(index, self.drafter.propose(observed))
        return sent

    def _step(self, jobs: list[Job]) -> _InFlight:
        limited = any(job.limited for job in jobs)
        slots = tuple(job.slot for job in jobs)
        if self.graphs is not None:
            result = self.graphs(slots, limited=limited)
        else:
            result = self.step(self.slots.index(slots), limited=limited)
        return self._send(jobs, result)

    def _send(self, jobs: list[Job], result: StepResult) -> _InFlight:
        """Starts the copy of a result to the host."""
        launched = tuple((job, job.residence) for job in jobs)
        if self.target.device.type != "cuda":
            return _InFlight(launched, result, None)

        packed = result.packed
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        sent = StepResult(host.copy_(packed, non_blocking=True))
        ready = torch.cuda.Event()
        ready.record()
        return _InFlight(launched, sent, ready)

    def _collect(
        self, flying: deque[_InFlight], active: list[Job], free: list[int], leave: int
    ) -> Iterator[Generation]:
        """Reads results until `leave` are in flight; yields the requests that finish."""
        while len(flying) > leave:
            landed = flying.popleft()
            if landed.ready is not None:
                landed.ready.synchronize()
            result = landed.result
            rows = zip(
                landed.jobs,
                result.tokens.tolist(),
                result.accepted.tolist(),
                result.num_drafts.tolist(),
                result.chance.tolist(),
                strict=False,  # a graph's batch may be padded
            )
            for (job, residence), tokens, accepted, num_drafts, chance in rows:
                if job.residence != residence:
                    continue  # it has left since
                job.take(tokens[: accepted + 1], accepted, num_drafts, chance, self.max_length)
                if job.finish:
                    active.remove(job)
                    self._leave(job, free)
                    yield job.result()
