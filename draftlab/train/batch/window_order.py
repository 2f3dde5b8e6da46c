"""The order of training in windows (docs/methods.md §1): a function of seed, plan and window.

Each epoch permutes the shards that come and go and cuts them into groups of at most half of the
window. Records are shuffled, and packed into rows, within a group. So one group is trained while
the next is recorded, and both fit into the window. A step is packed when its group is there
(`WindowFeed`). Once no rank reads a group any more, the training reports it, so that
its shards can be deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from draftlab.errors import UserError
from draftlab.store.manifest import Manifest
from draftlab.train.batch.order import epoch_rows
from draftlab.train.batch.packing import Batch, OptimizerStep, Packer
from draftlab.train.distributed.ranks import Ranks, assign_micro_batches


class WindowStep(NamedTuple):
    """The rows of an optimizer step in records of the store.

    Attributes:
        group: the last group that the step reads, counted over all epochs.
        finished_groups: number of groups that no later step reads.
    """

    rows: list[list[int]]
    group: int
    finished_groups: int


class WindowOrder:
    """The order of a training on a store with a window.

    Attributes:
        first: number of the first shard that comes and goes.
        sizes: bytes of each shard from `first` on.
        num_groups: groups of an epoch.
    """

    def __init__(self, manifest: Manifest, seed: int) -> None:
        window = manifest.window
        self.seed, self.first = seed, window.validation_shards
        index = manifest.index
        counts, ends = index.shard_records[self.first :], index.shard_ends[self.first :]
        self._starts, self._ends = ends - counts, ends
        self.tokens = index.shard_tokens[self.first :]
        self.sizes = manifest.planned_sizes[self.first :]
        self.window, self._total = window.size, int(self.sizes.sum())
        half, largest = window.size // 2, int(self.sizes.max())
        # Groups of equal size up to one shard: a small last one would leave the trainer waiting.
        self.num_groups = 1 if self._total <= half else math.ceil(self._total / (half - largest))

    def check_steps(self, batch_rows: int, row_tokens: int) -> None:
        """Raise a `UserError` if an optimizer step may read more groups than the window holds."""
        if self._total <= self.window:
            return
        largest = max(self.sizes)
        group_bytes = self._total / self.num_groups - largest
        step_bytes = batch_rows * row_tokens * max(self.sizes / self.tokens)
        if group_bytes < step_bytes:
            needed = math.ceil(4 * (step_bytes + 2 * largest))
            needed = min(needed, max(self._total, 4 * int(largest)))  # all shards fit in
            raise UserError(
                f"expected a window whose half holds an optimizer step of {batch_rows} × "
                f"{row_tokens:,} tokens, found one of {self.window:,} bytes",
                where="record.window",
                do=f"raise it to {needed:,} bytes or more, or lower train.batch_rows or "
                "record.shard_tokens",
            )

    def epoch(self, epoch: int) -> list[list[int]]:
        """Return the groups of an epoch, as numbers of shards counted from `first` on."""
        seed = np.random.SeedSequence([self.seed, epoch], spawn_key=(0,))
        shards = np.random.default_rng(seed).permutation(len(self.sizes))
        begins = np.cumsum(self.sizes[shards]) - self.sizes[shards]
        # Python's integers: bytes times groups may be larger than an int64.
        starts = [-(-i * self._total // self.num_groups) for i in range(self.num_groups)]
        numbers = np.searchsorted(starts, begins, side="right")
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        return [group.tolist() for group in np.split(shards, cuts)]

    def groups(self) -> Iterator[list[int]]:
        """Yield the groups of all epochs, without end."""
        for epoch in count():
            yield from self.epoch(epoch)

    def needed(self, num_rows: int, row_tokens: int) -> Iterator[list[int]]:
        """Yield the groups that may be read for so many rows; rows are at most full."""
        for group in self.groups():
            if num_rows <= 0:
                return
            yield group
            num_rows -= math.ceil(self.tokens[group].sum() / row_tokens)

    def steps(self, lengths: np.ndarray, row_tokens: int, batch_rows: int) -> Iterator[WindowStep]:
        """Yield the optimizer steps, without end, from the lengths of all records; steps continue
        over groups and epochs.
        """
        rows: list[list[int]] = []
        number = 0
        for epoch in count():
            for in_epoch, group in enumerate(self.epoch(epoch)):
                bounds = zip(self._starts[group].tolist(), self._ends[group].tolist(), strict=True)
                records = np.concatenate([np.arange(first, end) for first, end in bounds])
                sequence = np.random.SeedSequence([self.seed, epoch], spawn_key=(1, in_epoch))
                seed = int(sequence.generate_state(1, np.uint64)[0])
                of_group = epoch_rows(lengths[records], row_tokens, seed=seed, epoch=epoch)
                rows += [records[row].tolist() for row in of_group]
                start = 0
                while len(rows) - start >= batch_rows:
                    end = start + batch_rows
                    finished_groups = number + (end == len(rows))
                    yield WindowStep(rows[start:end], number, finished_groups)
                    start = end
                rows = rows[start:]
                number += 1


class WindowFeed(Protocol):
    """What makes the shards of a window, as a training sees it.

    Groups are counted from the first epoch's first one on.
    """

    def begin(self, finished_groups: int) -> None:
        """Begin to make the groups behind the finished ones, on rank 0."""

    def wait(self, group: int) -> bool:
        """Wait for the shards of all groups up to this one; return whether any was missing, and
        raise a `UserError` if making them failed.
        """

    def report_finished_groups(self, count: int) -> None:
        """Report, on rank 0, how many groups no rank will read again."""

    def share_waited(self) -> float | None:
        """Return for how much of its time the recording has waited for room; None: not known."""

    def stop(self) -> None:
        """Have all `wait` end with an `InterruptedError`, since nothing is read any more."""


Pack = Callable[[OptimizerStep], list[Batch]]


class WindowReading:
    """Reads a store, which may have a window.

    Attributes:
        order: of a store with a window; None: it has none, and nothing is waited for.
        feed: what makes the shards; None: they are all there.
    """

    def __init__(self, packer: Packer) -> None:
        self.packer, self.order, settings = packer, None, packer.settings
        self.feed: WindowFeed | None = getattr(packer.store, "feed", None)
        if packer.store.window is not None:
            self.order = WindowOrder(packer.store.manifest, packer.seed)
            self.order.check_steps(settings.batch_rows, settings.row_tokens)
        self._finished_groups: dict[int, int] = {}
        self._waited: set[int] = set()

    def steps(self, order: WindowOrder, first: int, ranks: Ranks) -> Iterator[OptimizerStep]:
        """Yield a rank's share of the optimizer steps from `first` on."""
        settings, finished_groups = self.packer.settings, 0
        lengths = np.asarray(self.packer.store.lengths)
        steps = order.steps(lengths, settings.row_tokens, settings.batch_rows)
        for number, step in zip(range(settings.steps), steps, strict=False):
            if number >= first:
                if number == first and self.feed is not None:
                    self.feed.begin(finished_groups)
                micro_batches = assign_micro_batches(step.rows, settings.micro_rows, ranks)
                self._finished_groups[number] = step.finished_groups
                yield OptimizerStep(number, micro_batches, step.group)
            finished_groups = step.finished_groups

    def waiting(self, pack: Pack) -> Pack:
        """Return a function that packs a step once its shards are there."""

        def wait_and_pack(step: OptimizerStep) -> list[Batch]:
            if self.feed is not None and self.feed.wait(step.group):
                self._waited.add(step.number)
            return pack(step)

        return wait_and_pack

    def begin_step(self, number: int) -> None:
        """Report the groups that are finished, since all ranks have the first micro-batch of a step
        and all of earlier steps.
        """
        finished_groups = self._finished_groups.pop(number - 1, 0)
        if self.feed is not None and finished_groups:
            self.feed.report_finished_groups(finished_groups)

    def phase(self, number: int) -> str:
        """Return what training waits for before a step: "data", or the "window" of the store."""
        return "window" if number in self._waited else "data"

    def metrics(self) -> dict[str, float]:
        """Return for how much of its time the recording has waited for room, for metrics.jsonl."""
        share = None if self.feed is None else self.feed.share_waited()
        return {} if share is None else {"recording_waited": share}

    def stopping(self) -> AbstractContextManager[object]:
        """Return a block behind which nothing waits for shards: close `micro_batches` after it."""
        stack = ExitStack()
        if self.feed is not None:
            stack.callback(self.feed.stop)
        return stack
