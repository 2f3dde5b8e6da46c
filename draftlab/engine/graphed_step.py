"""The decode step as CUDA graphs: captured for some batch sizes, and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from draftlab.engine.drafter import HeadDrafter
from draftlab.engine.step import Step
from draftlab.kernels.compile_ahead import CompileAhead
from draftlab.kernels.launching import cdiv, next_power_of_2

_ROOM = 2**30
"""Bytes that must be free on a GPU beside as many as the run before a capture has left unused: a
capture needs as many again, and cannot use those."""


@dataclass
class _Graph:
    """A captured step, its input tensor of slots, and the slots that were last written there."""

    graph: torch.cuda.CUDAGraph
    index: Tensor
    result: Tensor
    slots: tuple[int, ...] = ()


class GraphedStep:
    """Replays the step from CUDA graphs, one for each batch size, all in one memory pool.

    A batch is padded with the dummy slot to `padded_size`. Its graph is captured on first use; if
    there is a larger one, only after steps with that have computed `patience` rows too many: a
    batch that shrinks towards the end of its requests passes most sizes in less time than a capture
    takes.

    Attributes:
        patience: rows of the dummy that a size may cost before its own graph is captured; 0 where
            steps are timed.
        emptied: whether a capture gave unused memory back to the GPU: what other engines of the
            process have kept for later steps, too.
    """

    SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)

    @classmethod
    def padded_size(cls, count: int) -> int:
        """Return the batch size of the graph that decodes `count` requests.

        Above 64 there are at most four sizes between two powers of two: a graph takes as long to
        capture as a hundred steps, and a large batch shrinks through all of them.
        """
        multiple = max(32, next_power_of_2(count) // 8)
        return next((size for size in cls.SIZES if size >= count), cdiv(count, multiple) * multiple)

    def __init__(self, step: Step) -> None:
        self.step = step
        self.patience, self.emptied = 4096, False
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        self._wasted_rows = Counter[tuple[int, bool]]()
        self._pool = torch.cuda.graph_pool_handle()
        # Code that is neither ours nor transformers' may keep a fake tensor of its first call.
        known_model = type(step.target.model).__module__.startswith("transformers.")
        known = known_model and isinstance(step.drafter, HeadDrafter | None)
        self._compile_ahead = CompileAhead(step.target.device) if known else None

    def __call__(self, slots: tuple[int, ...], *, limited: bool) -> Tensor:
        """Decode one step of `slots`; the next one of this size overwrites the result."""
        size = self._size(len(slots), limited)
        key = (size, limited)
        if key not in self._graphs:  # captured with dummies, so that no request's state changes
            index = self.step.input_batch.index([], size)
            captured, result = self.capture(lambda: self.step(index, limited=limited))
            self._graphs[key] = _Graph(captured, index, result)
        graph = self._graphs[key]
        if graph.slots != slots:
            graph.index.copy_(self.step.input_batch.index(slots, size))
            graph.slots = slots
        graph.graph.replay()
        return graph.result

    def _size(self, count: int, limited: bool) -> int:
        """Return the batch size of the graph that decodes the next step of `count` requests."""
        size = self.padded_size(count)
        key = size, limited
        if key in self._graphs or self._wasted_rows[key] >= self.patience:
            return size
        larger = [n for n, other in self._graphs if n > size and other == limited]
        chosen = min(larger, default=size)
        self._wasted_rows[key] += chosen - size
        return chosen

    def compile_ahead(self, run: Callable[[], object], kernels: Hashable = None) -> None:
        """Compile the kernels of a call side by side, where the model's code is known.

        Args:
            kernels: names them, if other engines of the target need them with the same head, too.
                Only the first such call compiles them: to ask for them takes a tenth of a second.
        """
        if self._compile_ahead is None:
            return
        if kernels is not None:
            key = kernels, id(getattr(self.step.drafter, "head", None))
            if key in self.step.target.asked_kernels:
                return
            self.step.target.asked_kernels.add(key)
        self._compile_ahead(run)

    def capture(
        self, run: Callable[[], Tensor], kernels: Hashable = None
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Return a graph of a call, and the result that its replays write.

        Its kernels are compiled first (`compile_ahead`); then it runs once, which makes the tensors
        that calls share.
        """
        self.compile_ahead(run, kernels)
        run()
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            result = run()
        return graph, result

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture the block as `torch.cuda.graph`, which gives unused memory back each time: the
        next steps of all engines would have to allocate it anew. What a run of the block needs is
        unused now.
        """
        device = self.step.target.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.mem_get_info(device)[0] < unused + _ROOM:
            torch.cuda.empty_cache()
            self.emptied = True
        torch.cuda.synchronize(device)
        with torch.cuda.stream(_capture_stream(device)):
            graph.capture_begin(pool=self._pool)
            try:
                yield
            finally:
                graph.capture_end()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device's captures: each stream has a workspace of cuBLAS."""
    return torch.cuda.Stream(device)
