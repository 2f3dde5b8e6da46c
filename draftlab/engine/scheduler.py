"""Scheduling on the host: which sequences run, in which slots, with which cache blocks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from draftlab.engine.generation_state import Sequence
from draftlab.engine.kv_pool import BlockPool
from draftlab.engine.sampling import Request

MANY_SLOTS = 256
"""Number of slots from which on waiting sequences are admitted several at a time: a prefill of
several prompts takes little longer than one of one."""
_ADMITTED_TOGETHER = 1 / 32
"""Share of many slots that must be free before waiting sequences take them."""


class Scheduler:
    """First come, first served; if blocks run out, the sequence admitted last is preempted.

    Args:
        requests: to be decoded, in order.
        pool: blocks of the KV cache.
        num_slots: sequences that run at once.
        k: drafts a step.
        max_length: positions of a sequence.

    Attributes:
        waiting: sequences to be admitted.
        running: admitted sequences, in the order of admission.
    """

    def __init__(
        self, requests: Iterable[Request], pool: BlockPool, num_slots: int, k: int, max_length: int
    ) -> None:
        self.pool, self.k, self.max_length = pool, k, max_length
        self.waiting = deque(Sequence(request, k, max_length) for request in requests)
        self.running: list[Sequence] = []
        self._free_slots = list(range(num_slots - 1, -1, -1))
        many = num_slots >= MANY_SLOTS
        self._admitted_together = int(num_slots * _ADMITTED_TOGETHER) if many else 1

    def admit(self) -> list[Sequence]:
        """Admit waiting sequences as long as there are slots and blocks; return them.

        With many slots none is admitted before several can be, while others run.
        """
        admitted: list[Sequence] = []
        if self.running and len(self._free_slots) < min(self._admitted_together, len(self.waiting)):
            return admitted
        while self.waiting and self._free_slots and self.allocate(self.waiting[0], 0):
            sequence = self.waiting.popleft()
            sequence.enter(self._free_slots.pop())
            admitted.append(sequence)
        self.running += admitted
        return admitted

    def allocate(self, sequence: Sequence, steps_in_flight: int) -> bool:
        """Allocate blocks for a sequence's next step; return False if there are too few.

        They hold the tokens known by then and the drafts of two steps.
        """
        positions = len(sequence.tokens) + self._ahead(steps_in_flight)
        if not self.pool.allocate(sequence.blocks, min(positions, self.max_length)):
            return False
        held = len(sequence.blocks) * self.pool.block_size
        sequence.room = held if held < self.max_length else math.inf
        return True

    def _ahead(self, steps_in_flight: int) -> int:
        """Return how many positions behind its known tokens a sequence needs for its next step."""
        return steps_in_flight * (self.k + 1) + 1 + 2 * self.k

    def reserve(self, steps_in_flight: int) -> tuple[list[Sequence], bool]:
        """Allocate blocks for the next step of every running sequence.

        Returns:
            The sequences that got blocks, and whether there are enough.
        """
        ahead, extended = self._ahead(steps_in_flight), []
        for sequence in self.running:
            if len(sequence.tokens) + ahead <= sequence.room:
                continue
            if not self.allocate(sequence, steps_in_flight):
                return extended, False
            extended.append(sequence)
        return extended, True

    def preempt(self) -> None:
        """Return the sequence admitted last to the front of the queue."""
        sequence = self.running[-1]
        self.remove(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free a sequence's slot and blocks.

        Steps in flight still write to its blocks, but before their next owner does.
        """
        self.running.remove(sequence)
        self.pool.free(sequence.blocks)
        self._free_slots.append(sequence.slot)
        sequence.leave()
