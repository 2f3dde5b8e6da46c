"""Counters of speculative decoding, with vLLM's definitions (methods §6, servers §3).

For every verify step with n > 0 drafts of which a are accepted: drafts += 1, draft_tokens += n,
accepted += a, accepted_at[i] += 1 for i < a; a is counted before truncation by a stop token or the
token limit. Acceptance length (AL) is 1 + accepted / drafts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add


@dataclass
class Counters:
    """Raw counters of verify steps for drafts of length at most k."""

    k: int
    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)
    undrafted_steps: int = 0
    truncated_tokens: int = 0

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.k

    def add_step(self, drafted: int, accepted: int) -> None:
        """Count one verify step; `drafted` = 0 counts as undrafted."""
        if not 0 <= accepted <= drafted <= self.k:
            raise ValueError(
                f"expected 0 <= accepted <= drafted <= {self.k}, found {accepted}, {drafted}"
            )
        if drafted == 0:
            self.undrafted_steps += 1
            return
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted += accepted
        for i in range(accepted):
            self.accepted_at[i] += 1

    def __add__(self, other: Counters) -> Counters:
        if self.k != other.k:
            raise ValueError(f"counters of different K cannot be added: {self.k} and {other.k}")
        scalars = {
            name: getattr(self, name) + getattr(other, name)
            for name in COUNTER_FIELDS
            if name not in ("k", "accepted_at")
        }
        accepted_at = [a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)]
        return Counters(self.k, accepted_at=accepted_at, **scalars)

    @staticmethod
    def total(counters: Iterable[Counters]) -> Counters:
        """Return the sum of one or more counters of the same k."""
        return reduce(add, counters)

    @property
    def acceptance_length(self) -> float | None:
        """AL, 1 + accepted / drafts; None when nothing was drafted."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_at(self) -> list[float] | None:
        """Unconditional acceptance at each draft position."""
        return [a / self.drafts for a in self.accepted_at] if self.drafts else None

    @property
    def conditional_acceptance_at(self) -> list[float | None]:
        """Acceptance at i given acceptance at i − 1; None where nothing reached i."""
        reached = [self.drafts, *self.accepted_at][: self.k]
        return [a / n if n else None for a, n in zip(self.accepted_at, reached, strict=True)]

    def check_tokens(self, output_tokens: int, prompts: int) -> None:
        """Check the accounting identity of methods §6; a decoder that drops a bonus token fails it.

        Raises:
            AssertionError: the identity does not hold; the message states both sides.
        """
        expected = (
            prompts + self.drafts + self.accepted + self.undrafted_steps - self.truncated_tokens
        )
        if output_tokens != expected:
            raise AssertionError(
                f"token accounting: {output_tokens} output tokens, but {prompts} first tokens + "
                f"{self.drafts} drafts + {self.accepted} accepted + {self.undrafted_steps} "
                f"undrafted − {self.truncated_tokens} truncated = {expected}"
            )


COUNTER_FIELDS = tuple(f.name for f in fields(Counters))
"""Names of all counters; report rows use the same names."""
