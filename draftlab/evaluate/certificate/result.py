"""What a losslessness certificate asks for, states, and how it reads
(`evaluate/certificate/certify.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from draftlab.engine.sampling import Generation
from draftlab.settings import Settings

ARMS = (True, False)  # T > 0 with draft probabilities and without


class CertifySettings(Settings):
    """How hard the engine is tried."""

    k: int = Field(default=2, ge=1)
    """Drafts a step at T > 0. Two put accepted, recovered and bonus tokens among three judged."""
    judged: int = Field(default=3, ge=1, le=6)
    """Tokens whose joint distribution is judged, behind the prefill's; top_k ** judged cells."""
    top_k: int = Field(default=4, ge=2)
    """Tokens the target may choose from."""
    temperature: float = Field(default=1.5, gt=0)
    """Of the target's sampling."""
    draft_temperature: float | None = Field(default=0.7, gt=0)
    """Of sampled drafts; None: the target's. Cooler drafts are accepted now and then at high T."""
    context: int = Field(default=24, ge=1)
    """Tokens of an answer that serve as the prompt; a short one is cheap to sample from."""
    contexts: int = Field(default=256, ge=1)
    """Contexts searched for one that would show every fault early."""
    finalists: int = Field(default=64, ge=1)
    """Contexts looked at in full, at most."""
    enough: int = Field(default=12_000, ge=100)
    """Looking on is not worth it once so few samples find every fault."""
    alpha: float = Field(default=1e-3, gt=0, lt=1)
    """Chance that a right engine fails at T > 0."""
    samples: int | None = Field(default=None, ge=100)
    """Samples of each test; None: as many as 99 % power against every fault needs."""
    max_samples: int = Field(default=40_000, ge=100)
    """At most so many, when `samples` is None."""
    batch: int = Field(default=256, ge=1)
    """Requests decoded at once."""
    equal_prompts: int = Field(default=32, ge=1)
    """Prompts whose tokens are compared at T = 0."""
    equal_tokens: int = Field(default=64, ge=2)
    """Tokens of their answers."""
    seed: int = 0
    """Of every noise."""

    @property
    def level(self) -> float:
        """Of each of the four tests: the joint and the acceptance of both arms (Bonferroni)."""
        return self.alpha / (2 * len(ARMS))


class ArmResult(BaseModel):
    """The engine at T > 0, with draft probabilities or without."""

    model_config = ConfigDict(extra="forbid")

    draft_probs: bool
    statistic: float | None
    """G; None: infinite, the engine emitted what the target cannot."""
    freedom: int
    p_value: float
    acceptance_p_value: float | None
    """That accepted counts agree with their expectation; None: the engine does not tell it."""
    n: int
    needed: dict[str, int | None]
    """Samples for 99 % power of G against each fault; None: more than anybody draws."""

    @property
    def n_for_99_power(self) -> int | None:
        """For the fault that is hardest to find."""
        known = [n for n in self.needed.values() if n is not None]
        return max(known) if len(known) == len(self.needed) else None

    @property
    def strong(self) -> bool:
        """Whether every fault would have been found 99 times in 100."""
        return self.n_for_99_power is not None and self.n >= self.n_for_99_power


class Certificate(BaseModel):
    """What was shown. The figures are those of the T > 0 test with the smallest p-value.

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
    """What failed, in words."""
    arms: list[ArmResult]
    lines: list[str]
    """Everything, ready to print."""


def arm_name(draft_probs: bool) -> str:
    """Of an arm, as lines call it."""
    return f"draft probabilities {'on' if draft_probs else 'off'}"


def arm_lines(
    arm: ArmResult, settings: CertifySettings, generations: Sequence[Generation]
) -> list[str]:
    """An arm in words."""
    shares = origins(generations, settings.judged)
    statistic = "∞ (impossible tokens)" if arm.statistic is None else f"{arm.statistic:.1f}"
    needed = "; ".join(
        f"{fault} {'too many' if n is None else f'{n:,}'}" for fault, n in arm.needed.items()
    )
    accepted = arm.acceptance_p_value
    heat = settings.draft_temperature or settings.temperature
    drafts = f"drafts sampled at T = {heat:g}" if arm.draft_probs else "argmax drafts"
    return [
        f"T = {settings.temperature:g}, top-k {settings.top_k}, K = {settings.k}, "
        f"{arm_name(arm.draft_probs)} ({drafts}): G = {statistic} on {arm.freedom} degrees of "
        f"freedom, p = {arm.p_value:.2g}, {arm.n:,} samples"
        + ("" if accepted is None else f"; acceptance as expected: p = {accepted:.2g}"),
        f"  judged tokens: {shares['accepted']:.0%} accepted drafts, {shares['recovered']:.0%} "
        f"recovered, {shares['bonus']:.0%} bonus",
        f"  samples for 99 % power: {needed}",
    ]


def origins(generations: Sequence[Generation], judged: int) -> dict[str, float]:
    """Shares of the judged tokens that were accepted drafts, recovered, or a bonus."""
    seen = {"accepted": 0, "recovered": 0, "bonus": 0}
    for generation in generations:
        left = judged
        for drafted, accepted in generation.steps:
            seen["accepted"] += min(accepted, left)
            left -= accepted
            if left > 0:
                seen["recovered" if accepted < drafted else "bonus"] += 1
                left -= 1
            if left <= 0:
                break
    total = max(sum(seen.values()), 1)
    return {name: count / total for name, count in seen.items()}
