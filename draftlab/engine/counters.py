"""Counters of speculative decoding, with vLLM's definitions (methods §6, servers §3).

For every verify step with n > 0 drafts of which a are accepted: drafts += 1, draft_tokens += n,
accepted += a, accepted_at[i] += 1 for i < a; a is counted before truncation by a stop token or the
token limit. Acceptance length (AL) is 1 + accepted / drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, field


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
        """Counts one verify step; `drafted` = 0 counts as undrafted."""
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
        return Counters(
            self.k,
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted + other.accepted,
            [a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)],
            self.undrafted_steps + other.undrafted_steps,
            self.truncated_tokens + other.truncated_tokens,
        )

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts; None when nothing was drafted."""
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
        """The accounting identity of methods §6; a decoder that drops a bonus token fails it.

        Raises:
            AssertionError: with both sides, when the identity does not hold.
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
