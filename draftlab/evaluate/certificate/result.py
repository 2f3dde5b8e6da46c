"""Settings and result of the losslessness certificate (`evaluate/certificate/certify.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftlab.engine.sampling import Generation
from draftlab.settings import Settings

DRAFT_PROBS = (True, False)
"""The drafter settings that are tested at T > 0: with and without draft probabilities."""


class CertifySettings(Settings):
    """Settings of the certificate."""

    k: int = Field(default=2, ge=1)
    """Drafts a step at T > 0. With two, three tested tokens include accepted, recovered and bonus
    tokens."""
    judged: int = Field(default=3, ge=1, le=6)
    """Tokens after the first one whose joint distribution is tested, in top_k ** judged cells."""
    top_k: int = Field(default=4, ge=2)
    """Tokens that the target samples from."""
    temperature: float = Field(default=1.5, gt=0)
    """Temperature of the target."""
    draft_temperature: float | None = Field(default=0.7, gt=0)
    """Temperature of sampled drafts; None: the target's. At a high temperature of the target,
    cooler drafts are accepted sometimes and rejected sometimes."""
    context: int = Field(default=24, ge=1)
    """Length of the prompts, in tokens; a short prompt is cheap to sample from."""
    contexts: int = Field(default=256, ge=1)
    """Contexts to search for one in which every fault shows with few samples."""
    finalists: int = Field(default=64, ge=1)
    """Largest number of contexts that are examined for every fault."""
    enough: int = Field(default=12_000, ge=100)
    """Stop the search once so few samples detect every fault."""
    alpha: float = Field(default=1e-3, gt=0, lt=1)
    """Probability that a correct engine fails at T > 0."""
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

    @property
    def level(self) -> float:
        """Level of each of the four tests: joint and acceptance, twice (Bonferroni)."""
        return self.alpha / (2 * len(DRAFT_PROBS))


class SamplingTest(BaseModel):
    """The result of the tests at T > 0 with or without draft probabilities."""

    model_config = ConfigDict(extra="forbid")

    draft_probs: bool
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
    def n_for_99_power(self) -> int | None:
        """Samples for the fault that needs the most."""
        counts = [n for n in self.needed.values() if n is not None]
        return max(counts) if len(counts) == len(self.needed) else None

    @property
    def has_power(self) -> bool:
        """Whether the test detects every fault with 99 % probability."""
        return self.n_for_99_power is not None and self.n >= self.n_for_99_power


class Certificate(BaseModel):
    """The result of all tests; the numbers are those of the T > 0 test with the smallest p-value.

    `level`: L1, equal in distribution, tested with 99 % power, and equal tokens at T = 0; L2, equal
    tokens at T = 0 in float32; L3, neither is shown.
    """

    model_config = ConfigDict(extra="forbid")

    level: Literal["L1", "L2", "L3"]
    test: str
    statistic: float | None
    p_value: float
    n: int
    n_for_99_power: int | None
    prompts_equal: float
    passed: bool
    faults: list[str]
    """One sentence per failed test."""
    arms: list[SamplingTest]
    """The tests at T > 0, with and without draft probabilities."""
    lines: list[str]
    """The certificate as text."""


def sampling_test_name(draft_probs: bool) -> str:
    """Return the name of a test at T > 0."""
    return f"draft probabilities {'on' if draft_probs else 'off'}"


def sampling_test_lines(
    test: SamplingTest, settings: CertifySettings, generations: Sequence[Generation]
) -> list[str]:
    """Return a test at T > 0 as text."""
    shares = token_origins(generations, settings.judged)
    statistic = "∞ (impossible tokens)" if test.statistic is None else f"{test.statistic:.1f}"
    needed = "; ".join(
        f"{fault} {'too many' if n is None else f'{n:,}'}" for fault, n in test.needed.items()
    )
    acceptance = test.acceptance_p_value
    draft_temperature = settings.draft_temperature or settings.temperature
    drafts = f"drafts sampled at T = {draft_temperature:g}" if test.draft_probs else "argmax drafts"
    return [
        f"T = {settings.temperature:g}, top-k {settings.top_k}, K = {settings.k}, "
        f"{sampling_test_name(test.draft_probs)} ({drafts}): G = {statistic} on {test.freedom} "
        f"degrees of freedom, p = {test.p_value:.2g}, {test.n:,} samples"
        + ("" if acceptance is None else f"; accepted against expected: p = {acceptance:.2g}"),
        f"  tested tokens: {shares['accepted']:.0%} accepted drafts, {shares['recovered']:.0%} "
        f"recovered, {shares['bonus']:.0%} bonus",
        f"  samples for 99 % power: {needed}",
    ]


def token_origins(generations: Sequence[Generation], tokens: int) -> dict[str, float]:
    """Return the shares of accepted drafts, recovered and bonus tokens in the first `tokens`."""
    counts = {"accepted": 0, "recovered": 0, "bonus": 0}
    for generation in generations:
        left = tokens
        for drafted, accepted in generation.steps:
            counts["accepted"] += min(accepted, left)
            left -= accepted
            if left > 0:
                counts["recovered" if accepted < drafted else "bonus"] += 1
                left -= 1
            if left <= 0:
                break
    total = max(sum(counts.values()), 1)
    return {name: count / total for name, count in counts.items()}
