"""What a training reads of a store with a window: steps in its order, once their shards are there.

A step is packed when its group of shards is there (`store.window.WindowFeed`). As soon as no rank
reads a group any more, the training reports it, so that its shards can be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack

import numpy as np

from draftlab.store.window import WindowFeed
from draftlab.train.batch.packer import OptimizerStep, Packer
from draftlab.train.batch.packing import Batch
from draftlab.train.batch.window_order import WindowOrder
from draftlab.train.distributed.ranks import Ranks, assign_micro_batches

Pack = Callable[[OptimizerStep], list[Batch]]


class WindowReading:
    """Reads a store with a window.

    Args:
        packer: the data set.
        feed: what makes the shards; None: they are all there.
    """

    def __init__(self, packer: Packer, feed: WindowFeed | None) -> None:
        self.packer, self.feed = packer, feed
        settings = packer.settings
        self.order = WindowOrder(packer.store.manifest, packer.seed)
        self.order.check_steps(settings.batch_rows, settings.row_tokens)
        self._finished_groups: dict[int, int] = {}
        self._waited: set[int] = set()

    @classmethod
    def of(cls, packer: Packer) -> WindowReading | None:
        """Return what reads the store of a data set; None if it has no window."""
        if packer.store.window is None:
            return None
        return cls(packer, getattr(packer.store, "feed", None))

    def steps(self, first: int, ranks: Ranks) -> Iterator[OptimizerStep]:
        """Yield a rank's share of the optimizer steps from `first` on."""
        settings, finished_groups = self.packer.settings, 0
        lengths = np.asarray(self.packer.store.lengths)
        order = self.order.steps(lengths, settings.row_tokens, settings.batch_rows)
        for number, step in zip(range(settings.steps), order, strict=False):
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
        """Report the groups that are finished when all ranks have read a step."""
        finished_groups = self._finished_groups.pop(number - 1, 0)
        if self.feed is not None and finished_groups:
            self.feed.report_finished_groups(finished_groups)

    def has_waited(self, number: int) -> bool:
        """Return whether the shards of a step were not there when it should have been packed."""
        return number in self._waited

    def metrics(self) -> dict[str, float]:
        """Return for how much of its time the recording has waited for room."""
        share = None if self.feed is None else self.feed.share_waited()
        return {} if share is None else {"recording_waited": share}

    def stopping(self) -> AbstractContextManager[object]:
        """Return a block behind which nothing waits for shards."""
        stack = ExitStack()
        if self.feed is not None:
            stack.callback(self.feed.stop)
        return stack
