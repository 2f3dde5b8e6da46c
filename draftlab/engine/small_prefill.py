"""Prefill of short prompts in static shapes, so that CUDA graphs hold it.

Requests that replace finished ones are prefilled a few at a time. The host then takes longer
to launch the kernels of such a prefill than the GPU to run them, and running requests wait. Here
prompts are padded to one of a few shapes, and on CUDA each shape is captured on first use: one
graph runs the target and samples the first tokens, and another one proposes the first drafts. More
prompts than a shape holds are split into several batches: `launch_prefill` takes much longer.

An engine of hundreds of slots admits dozens of prompts at once, which fill larger shapes; it has no
smaller ones, so that it captures few.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from draftlab.engine.base_drafter import VerifiedFeatures
from draftlab.engine.generation_state import InFlight, Sequence, copy_to_host
from draftlab.engine.graphed_step import GraphedStep
from draftlab.engine.prefill import emit_first_tokens, run_columns
from draftlab.engine.scheduler import MANY_SLOTS
from draftlab.engine.step import Step
from draftlab.kernels.compile_ahead import is_fake
from draftlab.target_model.hidden_states import HiddenStates
from draftlab.target_model.images import has_images

_Call = Callable[[Tensor], Tensor]


class PrefillShape(NamedTuple):
    """Rows and columns of padded prompts, and whether one of them samples with top-k or top-p."""

    rows: int
    columns: int
    limited: bool


class SmallPrefill:
    """Prefills prompts that fit one of the shapes.

    Args:
        step: the engine's step.
        graphs: the engine's graphs, whose memory is shared; None: launch kernel by kernel.
        max_tokens: most tokens of a shape, padding included.
    """

    ROWS = 1, 2, 4, 8, 16  # many short answers end in the same step
    MANY_ROWS = 8, 32  # of an engine with many slots
    COLUMNS = 32, 64, 96, 128, 192, 256, 384, 512

    def __init__(self, step: Step, graphs: GraphedStep | None, max_tokens: int) -> None:
        self.step, self.graphs, self.max_tokens = step, graphs, max_tokens
        self.many = step.input_batch.num_slots >= MANY_SLOTS
        self.rows = self.MANY_ROWS if self.many else self.ROWS
        self._prefills: dict[PrefillShape, _Call] = {}
        self._drafts: dict[int, _Call] = {}  # by rows
        self._verified: dict[int, VerifiedFeatures] = {}  # by rows: what first drafts begin from

    def batches(
        self, sequences: list[Sequence]
    ) -> list[tuple[list[Sequence], PrefillShape | None]]:
        """Split newly admitted sequences into batches, each with its shape; None: those that
        `launch_prefill` runs.

        Prompts of similar lengths share a batch, and all too long ones do. None has a shape if one
        of them was preempted or has images; unless the slots are many, also if two prompts are
        equal, which `launch_prefill` computes once, or if they are more than are admitted while
        others run.
        """
        if any(s.resumed or has_images(self.step.target, s.tokens) for s in sequences):
            return [(sequences, None)]
        if not self.many:
            prompts = {tuple(sequence.tokens) for sequence in sequences}
            if len(sequences) > 2 * self.rows[-1] or len(prompts) < len(sequences):
                return [(sequences, None)]
        batches: list[tuple[list[Sequence], PrefillShape | None]] = []
        rest = sorted(sequences, key=lambda sequence: len(sequence.tokens))
        while rest:
            count, columns = self._fitting(rest)
            if columns is None:  # the longest prompt is too long, and so may be others
                count = sum(self._fitting([one])[1] is None for one in rest)
            batch, rest = rest[-count:], rest[:-count]
            rows, limited = _smallest(self.rows, count), any(one.limited for one in batch)
            fits = columns is not None and rows is not None
            batches.append((batch, PrefillShape(rows, columns, limited) if fits else None))
        return batches

    def _fitting(self, sequences: list[Sequence]) -> tuple[int, int | None]:
        """Return how many of the last sequences fit one shape, and its columns; 0, None: none do.

        Args:
            sequences: in the order of their lengths.
        """
        columns = _smallest(self.COLUMNS, len(sequences[-1].tokens))
        fitting = [rows for rows in self.rows if rows * (columns or 0) <= self.max_tokens]
        if columns is None or not fitting:
            return 0, None
        return min(fitting[-1], len(sequences)), columns

    @torch.inference_mode()
    def __call__(self, sequences: list[Sequence], shape: PrefillShape) -> Tensor:
        """Run the sequences' prompts; return their first tokens, as `emit_first_tokens` does.

        The next call with this shape overwrites the result.
        """
        rows = [
            [s.slot, len(s.tokens), *s.tokens, *[0] * (shape.columns - len(s.tokens))]
            for s in sequences
        ]
        rows += [self._empty_row(shape)] * (shape.rows - len(sequences))
        return self._prefill(shape)(self.step.input_batch.to_device(rows, torch.int64))

    @torch.inference_mode()
    def launch(self, sequences: list[Sequence], shape: PrefillShape) -> InFlight:
        """Launch the prefill of sequences, then their first drafts."""
        launched = copy_to_host(sequences, self(sequences, shape))
        if self.step.drafter is not None:
            slots = [sequence.slot for sequence in sequences]
            index = self.step.input_batch.index(slots, shape.rows)
            self._first_drafts(shape.rows)(index[:, None])
        return launched

    def _prefill(self, shape: PrefillShape) -> _Call:
        if shape not in self._prefills:
            empty = self._empty_row(shape)
            self._prefills[shape] = self._capture(
                lambda inputs: self._run(inputs, shape), empty, shape.rows, shape
            )
        return self._prefills[shape]

    def _first_drafts(self, rows: int) -> _Call:
        def run(inputs: Tensor) -> Tensor:
            self.step.draft(inputs[:, 0], self._verified[rows])
            return inputs

        if rows not in self._drafts:
            dummy = self.step.input_batch.dummy
            self._drafts[rows] = self._capture(run, [dummy], rows)
        return self._drafts[rows]

    def _empty_row(self, shape: PrefillShape) -> list[int]:
        return [self.step.input_batch.dummy] + [0] * (1 + shape.columns)

    def _run(self, inputs: Tensor, shape: PrefillShape) -> Tensor:
        """Prefill int64 [R, 2 + S]: slots, lengths and padded prompts; the dummy has length 0."""
        index, lengths, tokens = inputs[:, 0], inputs[:, 1], inputs[:, 2:]
        following, num_pairs = tokens.roll(-1, 1), tokens.shape[1] - 1
        states = run_columns(self.step, index, lengths, tokens, following, 0, num_pairs=num_pairs)
        last = torch.arange(len(tokens), device=tokens.device), (lengths - 1).clamp(min=0)
        ends = HiddenStates(states.features[last], states.last[last])
        result, verified = emit_first_tokens(self.step, index, lengths, ends, limited=shape.limited)
        if verified is not None and not is_fake():
            _copy(verified, self._verified.setdefault(len(tokens), verified))
        return result

    def _capture(self, run: _Call, empty: list[int], rows: int, kernels: Hashable = None) -> _Call:
        """Return `run` as a CUDA graph, captured with rows of the dummy so that no request changes;
        without graphs, `run` itself.

        Args:
            kernels: see `GraphedStep.compile_ahead`.
        """
        inputs = self.step.input_batch.to_device([empty] * rows, torch.int64)
        if self.graphs is None:
            run(inputs)
            return run
        # The first run, outside of the graph, makes the tensors that graphs share.
        graph, result = self.graphs.capture(lambda: run(inputs), kernels)

        def replay(values: Tensor) -> Tensor:
            inputs.copy_(values)
            graph.replay()
            return result

        return replay


def _smallest(sizes: tuple[int, ...], least: int) -> int | None:
    """Return the smallest of the ascending sizes that is large enough; None: none is."""
    return next((size for size in sizes if size >= least), None)


def _copy(source: VerifiedFeatures, target: VerifiedFeatures) -> None:
    """Copy tensors to those that the graphs of first drafts read."""
    for one, other in ((source, target), (source.keys, target.keys)):
        for name, value in vars(one).items():
            if isinstance(value, Tensor):
                getattr(other, name).copy_(value)
