"""The agreement of all ranks on a signal to end by, so that they end after the same step."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager

import torch

from draftlab.signals import ENDING_SIGNALS, on_ending_signal
from draftlab.train.distributed.ranks import Ranks


class EndingSignal:
    """A SIGTERM or SIGHUP that any rank received.

    Attributes:
        agreed: the signal, equal on all ranks; None: none had received one in the last `sum`.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.agreed: signal.Signals | None = None
        self._received: list[int] = []

    def postponed(self) -> AbstractContextManager[None]:
        """Return a block in which signals do not end the process."""
        return on_ending_signal(self._received.append)

    def sum(self, numbers: list[int]) -> list[int]:
        """Return the sums of numbers over all ranks, which agree on a signal on this occasion."""
        flags = [int(number in self._received) for number in ENDING_SIGNALS]
        sums = self.ranks.all_reduce(torch.tensor([*numbers, *flags])).tolist()
        received = zip(ENDING_SIGNALS, sums[len(numbers) :], strict=True)
        self.agreed = next((number for number, count in received if count), None)
        return sums[: len(numbers)]
