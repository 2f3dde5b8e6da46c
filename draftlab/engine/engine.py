"""Schedule requests over a paged KV cache. The GPU runs one step ahead of the host, which does the
bookkeeping.

    admit ─► prefill ─► step ─► step ─► …                        (device, in stream order)
                 └─ results ─► append tokens, count, finish, free blocks        (host)

Every request holds a slot of the input batch and blocks of the KV cache. On CUDA a step is one
replayed graph, and the host reads the results of step n while step n + 1 runs; a request whose end
the host has not read yet takes part in one more step, whose result is dropped. If the pool has no
free block, the request that was admitted last is preempted and computed again later: noise is keyed
by request and position, so its drafts and tokens do not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import repeat
from operator import attrgetter

import torch
from torch import Tensor

from draftlab.engine.base_drafter import Drafter
from draftlab.engine.generation_state import InFlight, Sequence, check_prompts, copy_to_host
from draftlab.engine.graphed_step import GraphedStep
from draftlab.engine.kv_pool import BlockPool, draft_kv_bytes, new_kv_pool
from draftlab.engine.prefill import launch_prefill
from draftlab.engine.sampling import Generation, Request
from draftlab.engine.scheduler import Scheduler
from draftlab.engine.small_prefill import SmallPrefill
from draftlab.engine.step import InputBatch, Step, Verifier
from draftlab.kernels.devices import out_of_memory_error, use_device
from draftlab.kernels.step_layout import unpack_results
from draftlab.kernels.verify import verify
from draftlab.progress import Monitor
from draftlab.target_model.fused_decoder import FusedDecoder
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache

_LESS_MEMORY = "lower regenerate.batch, eval.batch, eval.timing_batches, or the lengths"


class Engine:
    """Decodes requests with a target and, when given, a drafter.

    Args:
        target: the model whose distribution is kept.
        drafter: proposes drafts; None decodes plainly.
        batch: requests decoded at once.
        max_length: positions of a sequence (prompt and answer); drafts are capped near it.
        block_size: positions in a cache block; None: 64 on a GPU, `max_length` on a CPU (so that
            a sequence's keys are contiguous).
        num_blocks: blocks in the pool; None: enough for `batch` sequences of `max_length`, as far
            as free memory goes (`engine/kv_pool.py`).
        cache: a KV cache of `new_kv_pool` to share with engines that take turns; None: a new one.
        prefill_tokens: prompt tokens in a forward pass.
        verifier: decides which drafts are accepted; it has the signature of
            `kernels.verify.verify`.
        expect: also compute the expected acceptance of sampled drafts.
        graphs: replay CUDA graphs; None: if the target can be captured.
        cpu_prepacked: on a CPU, use weights prepacked for oneDNN where the target has that path
            (`target_model/prepacked_decoder.py`): faster, and different in the last bits. It has
            no effect on a GPU.
        monitor: told if memory makes the pool smaller.

    Attributes:
        max_in_flight: steps that the device may be ahead of the host.
        on_step: called with a sequence after the tokens of a step were added to it; None: nothing.
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
        cache: PagedCache | None = None,
        prefill_tokens: int = 2048,
        verifier: Verifier = verify,
        expect: bool = True,
        graphs: bool | None = None,
        cpu_prepacked: bool = False,
        monitor: Monitor | None = None,
    ) -> None:
        self.target, self.drafter, self.max_length = target, drafter, max_length
        self.k = drafter.k if drafter else 0
        on_gpu = target.device.type == "cuda"
        head = getattr(drafter, "head", None)
        self.cache = cache or new_kv_pool(
            target,
            batch=batch,
            max_length=max_length,
            draft_bytes=draft_kv_bytes(head) if head else 0,
            block_size=block_size,
            num_blocks=num_blocks,
            monitor=monitor,
        )
        self.block_size, pool_size = self.cache.block_size, self.cache.num_blocks
        self.num_blocks = pool_size - 1  # block 0 is never allocated
        if drafter:
            drafter.start(
                pool_size, self.block_size, max_length=max_length, cpu_prepacked=cpu_prepacked
            )
        self.input_batch = InputBatch(
            batch,
            self.k,
            -(-max_length // self.block_size),
            target.device,
            draft_vocab=drafter.draft_vocab if drafter else None,
            confidence=bool(drafter and drafter.confidence),
        )
        self.step = Step(
            target,
            self.cache,
            self.input_batch,
            drafter,
            max_length=max_length,
            verifier=verifier,
            expect=expect,
            cpu_prepacked=cpu_prepacked,
        )
        self.prefill_tokens = prefill_tokens
        use_graphs = target.can_capture if graphs is None else graphs
        self.graphs = GraphedStep(self.step) if use_graphs else None
        self.small_prefill = None
        if on_gpu and self.cache.states is None:
            self.small_prefill = SmallPrefill(self.step, self.graphs, prefill_tokens)
        self.max_in_flight = 1 if on_gpu else 0
        self.on_step: Callable[[Sequence], None] | None = None

    @torch.inference_mode()
    def generate(self, requests: Collection[Request]) -> Iterator[Generation]:
        """Yield each request's generation when it finishes.

        Raises:
            UserError: a prompt is empty or leaves no room for an answer, or memory runs out.
        """
        check_prompts(requests, self.max_length)
        with out_of_memory_error("decoding", _LESS_MEMORY):
            yield from self._generate(requests)

    def _generate(self, requests: Collection[Request]) -> Iterator[Generation]:
        pool = BlockPool(self.num_blocks, self.block_size)
        scheduler = Scheduler(requests, pool, self.input_batch.num_slots, self.k, self.max_length)
        in_flight: deque[InFlight] = deque()
        collect = partial(self._collect, scheduler, in_flight)
        while scheduler.waiting or scheduler.running or in_flight:
            if admitted := scheduler.admit():
                with use_device(self.target.device):
                    in_flight += self._prefill(admitted)
                yield from collect(self.max_in_flight)
            while not self._reserve_blocks(scheduler, len(in_flight)):
                if in_flight:
                    yield from collect(0)  # some sequences may have finished
                else:
                    scheduler.preempt()
            if scheduler.running:
                with use_device(self.target.device):
                    in_flight.append(self._decode(scheduler.running))
            yield from collect(self.max_in_flight if scheduler.running else 0)

    def _reserve_blocks(self, scheduler: Scheduler, steps_in_flight: int) -> bool:
        """Return whether every running sequence has blocks for its next step."""
        extended, is_enough = scheduler.reserve(steps_in_flight)
        if extended:
            blocks = [sequence.blocks for sequence in extended]
            self.input_batch.set_blocks(self._index(extended), blocks)
        return is_enough

    def _prefill(self, sequences: list[Sequence]) -> list[InFlight]:
        """Launch the prefill of admitted sequences and propose their first drafts."""
        index = self._index(sequences)
        self.input_batch.set_requests(index, [sequence.request for sequence in sequences])
        self.input_batch.set_blocks(index, [sequence.blocks for sequence in sequences])
        batches = [(sequences, None)]
        if self.small_prefill is not None:
            batches = self.small_prefill.batches(sequences)
        return [
            self._launch_prefill(batch)
            if shape is None
            else self.small_prefill.launch(batch, shape)
            for batch, shape in batches
        ]

    def _launch_prefill(self, sequences: list[Sequence]) -> InFlight:
        run = partial(launch_prefill, self.step, sequences, self.prefill_tokens)
        if self.graphs is not None and isinstance(self.step.decoder, FusedDecoder):
            samples_drafts = getattr(self.drafter, "draft_probs", False)
            self.graphs.compile_ahead(run, ("first prompts", samples_drafts))
        return run()

    def _index(self, sequences: list[Sequence]) -> Tensor:
        return self.input_batch.index([sequence.slot for sequence in sequences])

    def _decode(self, running: list[Sequence]) -> InFlight:
        """Launch a step of the running sequences."""
        sequences = sorted(running, key=attrgetter("slot"))
        limited = any(sequence.limited for sequence in sequences)
        slots = tuple(sequence.slot for sequence in sequences)
        if self.graphs is not None:
            return copy_to_host(sequences, self.graphs(slots, limited=limited))
        return copy_to_host(sequences, self.step(self.input_batch.index(slots), limited=limited))

    def _collect(
        self, scheduler: Scheduler, in_flight: deque[InFlight], max_in_flight: int
    ) -> Iterator[Generation]:
        """Read results until `max_in_flight` are left; yield the sequences that finish."""
        while len(in_flight) > max_in_flight:
            launch = in_flight.popleft()
            launch.wait()
            stated = self.input_batch.confidence is not None
            *unpacked, confidences = unpack_results(launch.result, confidence=stated)
            results = [x.tolist() for x in unpacked]
            results.append(confidences.tolist() if stated else repeat(None))
            rows = zip(launch.sequences, *results, strict=False)  # a graph's batch may be padded
            for (sequence, epoch), tokens, accepted, num_drafts, probability, confidence in rows:
                if sequence.epoch != epoch:
                    continue  # it has left the batch since
                sequence.add_result(tokens, accepted, num_drafts, probability, confidence)
                if self.on_step is not None:
                    self.on_step(sequence)
                if sequence.finish:
                    scheduler.remove(sequence)
                    yield sequence.result()


SMALL_TARGET_BYTES = 128 * 2**20
"""Weights of a target that one thread decodes. A step of such a target has operations of
microseconds, and handing them to a second thread took 1.6 times as long in wall time and 1.75 times
the CPU seconds (docs/benchmarks.md)."""


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one CPU thread inside the block."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def decoding_threads(target: Target) -> AbstractContextManager[None]:
    """Return a context in which torch has one CPU thread if the target is small."""
    size = sum(p.numel() * p.element_size() for p in target.model.parameters())
    return nullcontext() if size > SMALL_TARGET_BYTES else one_thread(target.device)
