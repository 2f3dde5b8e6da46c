"""How rows are sampled, and the result of the losslessness certificate (`certify.py`)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from draftlab.engine.drafter import Verification
from draftlab.formatting import p_text

MAX_LEVELS = 6
"""Most tokens that are tested together: a tree of more would not fit in memory."""
MAX_LEAVES = 64
"""Leaves of the trees of up to `MAX_LEVELS` tested tokens."""

Level = Literal["L1", "LS", "L2", "L3"]
"""See `Certificate`."""
LEVELS: tuple[Level, ...] = ("L3", "L2", "LS", "L1")
"""All levels, the weakest first."""


class Sampled(BaseModel, frozen=True):
    """How a row at T > 0 is sampled."""

    temperature: float
    k: int
    draft_probs: bool
    top_k: int | None = None
    top_p: float | None = None
    verification: Verification = "token"

    @property
    def widths(self) -> tuple[int, ...]:
        """Return the number of tokens that are told apart at each tested position.

        The positions reach a bonus token, as far as `MAX_LEVELS` allows.
        """
        levels = min(self.k + 1, MAX_LEVELS)
        return (max(int(MAX_LEAVES ** (1 / levels) + 1e-9), 2),) * levels

    @property
    def name(self) -> str:
        """The name in lines and messages."""
        limits = [f"{name} {value:g}" for name, value in
                  (("top-k", self.top_k), ("top-p", self.top_p)) if value]  # fmt: skip
        probs = f"draft probabilities {'on' if self.draft_probs else 'off'}"
        block = ["block verification"] if self.verification == "block" else []
        return ", ".join([f"T = {self.temperature:g}", *limits, f"K = {self.k}", probs, *block])


class JointTest(BaseModel, extra="forbid"):
    """The result of one G-test of the joint distribution of the first tokens."""

    part: Literal["sampler", "engine"]
    """sampler: rejection sampling on a known model; engine: the whole engine."""
    passed: bool
    statistic: float | None
    """G; None if it is infinite because an impossible token was emitted."""
    freedom: int
    p_value: float
    n: int
    detectable: float
    """Divergence from the exact joint, in nats, that would be found with 99 % power."""
    acceptance: float
    """Share of the verified drafts that were accepted; near 0 or 1 it hides faults."""

    def line(self, tokens: int) -> str:
        """Return the test as text."""
        statistic = "∞ (impossible tokens)" if self.statistic is None else f"{self.statistic:.1f}"
        return (
            f"  {self.part}: joint of {tokens} tokens, G = {statistic} on {self.freedom} degrees "
            f"of freedom, {p_text(self.p_value)}, {self.n:,} samples, {self.acceptance:.0%} of "
            f"drafts accepted; 99 % power from {self.detectable:.2g} nats: "
            f"{'passed' if self.passed else 'FAILED'}"
        )


class SamplingTest(Sampled, extra="forbid"):
    """The result of the tests of one row's sampling at T > 0."""

    level: Level
    test: str
    """What was tested."""
    passed: bool
    p_value: float
    """The smallest of its tests, not corrected for their number."""
    n: int
    """Samples of each test."""
    tests: list[JointTest]


class Certificate(BaseModel, extra="forbid"):
    """The result of all tests of a head; `level` is the weakest of its rows at T > 0.

    L1: rejection sampling keeps the distribution of a known model and the engine that of the
    target, and tokens are equal at T = 0, in float32. LS: rejection sampling keeps the distribution
    of a known model; the engine around it was not tested, as in 16 bits. L2: equal tokens at T = 0
    in float32. L3: none of these is shown.
    """

    level: Level
    prompts_equal: float
    """Share of prompts with plain decoding's tokens at T = 0."""
    passed: bool
    faults: list[str]
    """One sentence per failed test."""
    num_tests: int
    """Tests at T > 0 of the whole report, which share the level (Bonferroni)."""
    arms: list[SamplingTest]
    """The tests at T > 0, one for each row of the head."""
    lines: list[str]
    """The certificate as text."""
