"""Settings and result of the losslessness certificate (`evaluate/certificate/certify.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftlab.engine.drafter import Verification
from draftlab.evaluate.certificate.exact_tree import TreeSettings
from draftlab.settings import Settings

MAX_LEVELS = 6
"""Most tested tokens after the first: a tree of more would not fit in memory."""
MAX_LEAVES = 64
"""Leaves of the trees of up to `MAX_LEVELS` tested tokens."""

Level = Literal["L1", "LS", "L2", "L3"]
"""See `Certificate`."""
LEVELS: tuple[Level, ...] = ("L3", "L2", "LS", "L1")
"""All levels, the weakest first."""


@dataclass(frozen=True)
class Sampled:
    """How a row at T > 0 is sampled."""

    temperature: float
    k: int
    draft_probs: bool
    draft_temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    verification: Verification = "token"

    @property
    def tree(self) -> TreeSettings:
        """The tree that tests it: deep enough for a bonus token, as far as `MAX_LEVELS` allows."""
        levels = min(self.k + 1, MAX_LEVELS)
        drafts = (self.draft_temperature or self.temperature) if self.draft_probs else 0.0
        return TreeSettings(
            levels=levels,
            width=max(int(MAX_LEAVES ** (1 / levels) + 1e-9), 2),
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            k=self.k,
            draft_temperature=drafts,
            verification=self.verification,
        )

    @property
    def name(self) -> str:
        """The name in lines and messages."""
        limits = [f"{name} {value:g}" for name, value in
                  (("top-k", self.top_k), ("top-p", self.top_p)) if value]  # fmt: skip
        probs = f"draft probabilities {'on' if self.draft_probs else 'off'}"
        if self.draft_temperature:
            probs += f" (drafts at T = {self.draft_temperature:g})"
        block = ["block verification"] if self.verification == "block" else []
        return ", ".join([f"T = {self.temperature:g}", *limits, f"K = {self.k}", probs, *block])


class CertifySettings(Settings):
    """Settings of the certificate."""

    context: int = Field(default=24, ge=1)
    """Length of the prompts, in tokens; a short prompt is cheap to sample from."""
    contexts: int = Field(default=256, ge=1)
    """Contexts to search for one in which every fault shows with few samples."""
    finalists: int = Field(default=64, ge=1)
    """Largest number of contexts that are examined for every fault."""
    enough: int = Field(default=12_000, ge=100)
    """Stop the search once so few samples detect every fault."""
    alpha: float = Field(default=1e-3, gt=0, lt=1)
    """Probability that a correct engine fails in any test at T > 0."""
    samples: int | None = Field(default=None, ge=100)
    """Samples of each test; None: as many as 99 % power against every fault needs."""
    max_samples: int = Field(default=40_000, ge=100)
    """Largest number of samples if `samples` is None."""
    batch: int = Field(default=256, ge=1)
    """Requests decoded at once."""
    equal_prompts: int = Field(default=32, ge=1)
    """Prompts whose tokens are compared at T = 0."""
    equal_tokens: int = Field(default=64, ge=2)
    """Tokens of an answer at T = 0."""
    seed: int = 0
    """Seed of the sampling noise."""

    num_rows: int = Field(default=2, ge=1)
    """Rows at T > 0 of the report, whose tests share `alpha`."""

    @property
    def level(self) -> float:
        """Level of each test: joint and acceptance of every row (Bonferroni)."""
        return self.alpha / (2 * self.num_rows)


class SamplingTest(BaseModel):
    """The result of the tests of one row's sampling at T > 0."""

    model_config = ConfigDict(extra="forbid")

    temperature: float
    k: int
    draft_probs: bool
    draft_temperature: float | None
    top_k: int | None
    top_p: float | None
    verification: Verification = "token"
    level: Level
    test: str
    """What was tested."""
    passed: bool
    statistic: float | None
    """G; None if it is infinite because the engine emitted an impossible token."""
    freedom: int
    p_value: float
    acceptance_p_value: float | None
    """p-value of the accepted counts; None if the engine does not report expectations."""
    n: int
    needed: dict[str, int | None]
    """Samples for 99 % power of G against each fault; None: too many to draw."""

    @property
    def row(self) -> Sampled:
        """How the tested row is sampled."""
        names = [field.name for field in fields(Sampled)]
        return Sampled(**{name: getattr(self, name) for name in names})

    @property
    def n_for_99_power(self) -> int | None:
        """Samples for the fault that needs the most."""
        counts = [n for n in self.needed.values() if n is not None]
        return max(counts) if len(counts) == len(self.needed) else None

    @property
    def has_power(self) -> bool:
        """True if the test detects every fault with 99 % probability."""
        return self.n_for_99_power is not None and self.n >= self.n_for_99_power


class Certificate(BaseModel):
    """The result of all tests of a head; `level` is the weakest of its rows at T > 0.

    L1: equal in distribution, tested with 99 % power, and equal tokens at T = 0, in float32. LS: in
    16 bits, sampler and verifier keep the distribution of the target's own logits, tested with 99 %
    power. L2: equal tokens at T = 0 in float32. L3: none of these is shown. A row that could not be
    tested is L2 in float32 and L3 in 16 bits.
    """

    model_config = ConfigDict(extra="forbid")

    level: Level
    prompts_equal: float
    """Share of prompts with plain decoding's tokens at T = 0."""
    passed: bool
    faults: list[str]
    """One sentence per failed test."""
    arms: list[SamplingTest]
    """The tests at T > 0, one for each row of the head."""
    lines: list[str]
    """The certificate as text."""


def sampling_test_lines(test: SamplingTest) -> list[str]:
    """Return a test at T > 0 as text."""
    statistic = "∞ (impossible tokens)" if test.statistic is None else f"{test.statistic:.1f}"
    needed = "; ".join(
        f"{fault} {'too many' if n is None else f'{n:,}'}" for fault, n in test.needed.items()
    )
    acceptance = test.acceptance_p_value
    return [
        f"{test.test}: G = {statistic} on {test.freedom} degrees of freedom, p = "
        f"{test.p_value:.2g}, {test.n:,} samples"
        + ("" if acceptance is None else f"; accepted against expected: p = {acceptance:.2g}")
        + f": {'passed' if test.passed else 'FAILED'}, {test.level}",
        f"  samples for 99 % power: {needed}"
        + ("" if test.has_power else "; L1 and LS are not shown, since some fault needs more"),
    ]
