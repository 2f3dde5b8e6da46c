"""The losslessness certificate (METHODS §5): does the engine keep the target's distribution?

At T = 0 tokens must equal plain decoding's. At T > 0, with top-k, a few tokens behind a context
have few possible answers, whose exact probabilities the target gives alone (`decode/tree.py`); the
engine answers the same context many times, with and without draft probabilities, and a G-test
compares. Contexts are chosen so that known faults would show (`decode/faults.py`): a head that is
always right, or always wrong, hides them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Literal, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from draftlab.base import Knobs, Monitor, UserError
from draftlab.decode.drafter import ChainDrafter, Drafter
from draftlab.decode.engine import Engine
from draftlab.decode.faults import Fault, emitted
from draftlab.decode.goodness import g_test, samples_for
from draftlab.decode.sampling import Generation, Request, Sampling
from draftlab.decode.tree import Tree, grow
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.results import Counters
from draftlab.target.model import Target

POWER = 0.99


class CertifyKnobs(Knobs):
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
    contexts: int = Field(default=64, ge=1)
    """Contexts searched for one that would show every fault early."""
    alpha: float = Field(default=1e-3, gt=0, lt=1)
    """Chance that a right engine fails, over all T > 0 tests."""
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


class ArmResult(BaseModel):
    """One G-test of the engine at T > 0."""

    model_config = ConfigDict(extra="forbid")

    draft_probs: bool
    statistic: float | None
    """None: infinite, the engine emitted what the target cannot."""
    freedom: int
    p_value: float
    n: int
    needed: dict[str, int | None]
    """Samples for 99 % power against each fault in this context; None: over ten million."""

    @property
    def n_for_99_power(self) -> int | None:
        """For the fault that is hardest to find."""
        known = [n for n in self.needed.values() if n is not None]
        return max(known) if len(known) == len(self.needed) else None


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
    arms: list[ArmResult]
    lines: list[str]


class Decodes(Protocol):
    """An engine."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yields each request's result as it finishes."""


EngineFactory = Callable[..., Decodes]
"""Called as `engine(target, drafter or None, batch=…, max_length=…)`."""


def certify(
    target: Target,
    head: Eagle3Head,
    prompts: Sequence[tuple[str, tuple[int, ...]]],
    stop_ids: frozenset[int],
    knobs: CertifyKnobs,
    *,
    k: int,
    monitor: Monitor,
    engine: EngineFactory | None = None,
) -> Certificate:
    """Tries the engine against the target alone.

    Args:
        prompts: ids and tokens.
        stop_ids: end an answer at T = 0; ignored at T > 0.
        k: drafts a step at T = 0.
        engine: makes the engine on trial; None: the product's.

    Returns:
        The certificate; its lines are ready to print.

    Raises:
        UserError: without prompts, or when no context can be judged.
    """
    if not prompts:
        raise UserError("expected prompts to certify the engine on, found none")
    return _Trial(target, head, engine or Engine, stop_ids, knobs, monitor).run(prompts, k)


@dataclass(frozen=True)
class _Trial:
    target: Target
    head: Eagle3Head
    engine: EngineFactory
    stop_ids: frozenset[int]
    knobs: CertifyKnobs
    monitor: Monitor

    def run(self, prompts: Sequence[tuple[str, tuple[int, ...]]], k: int) -> Certificate:
        knobs, lines, faults = self.knobs, [], []
        answers, equal = self._greedy(prompts[: knobs.equal_prompts], k, faults)
        dtype = str(self.target.dtype).removeprefix("torch.")
        exact = self.target.dtype == torch.float32
        lines.append(
            f"T = 0: tokens of {equal:.1%} of {len(answers)} prompts equal plain decoding's "
            f"({dtype}, K = {k})" + ("" if exact else "; rounding alone may part them")
        )
        windows = self._windows(answers)
        arms = []
        for draft_probs in (True, False):
            tree, needed = self._choose(windows, draft_probs)
            arm, told = self._judge(tree, needed, draft_probs, faults)
            arms.append(arm)
            lines += told
        worst = min(arms, key=lambda arm: arm.p_value)
        level = knobs.alpha / len(arms)
        fits = worst.p_value >= level and not faults
        passed = fits and (equal == 1 or not exact)
        strong = all(arm.n_for_99_power and arm.n >= arm.n_for_99_power for arm in arms)
        if not strong:
            lines.append("some fault needs more samples than were drawn: not shown in distribution")
        kind: Literal["L1", "L2", "L3"] = "L3"
        if passed and exact:
            kind = "L1" if strong else "L2"
        verdict = "passed" if passed else "FAILED"
        lines += faults
        lines.append(f"losslessness certificate: {verdict}, level {kind} (each p ≥ {level:g})")
        return Certificate(
            level=kind,
            test=f"G-test of {knobs.judged} tokens at T = {knobs.temperature:g}, "
            f"top-k {knobs.top_k}, K = {knobs.k}; tokens at T = 0",
            statistic=worst.statistic,
            p_value=worst.p_value,
            n=worst.n,
            n_for_99_power=worst.n_for_99_power,
            prompts_equal=equal,
            passed=passed,
            arms=arms,
            lines=lines,
        )

    def _greedy(
        self, prompts: Sequence[tuple[str, tuple[int, ...]]], k: int, faults: list[str]
    ) -> tuple[list[tuple[int, ...]], float]:
        """Prompts with their plain answers, and the share the speculative engine answers alike."""
        knobs = self.knobs
        requests = [
            Request(id_, ids, knobs.equal_tokens, Sampling(), self.stop_ids) for id_, ids in prompts
        ]
        longest = max(len(request.prompt_ids) for request in requests)
        room = min(longest + knobs.equal_tokens + k + 1, self.target.max_length)
        batch = min(len(requests), 32)
        found = []
        for drafter in (None, ChainDrafter(self.head, k)):
            engine = self.engine(self.target, drafter, batch=batch, max_length=room)
            found.append(self._decode(engine, requests, "certify T=0", faults))
        plain, drafted = found
        equal = float(np.mean([plain[r.id].token_ids == drafted[r.id].token_ids for r in requests]))
        return [(*r.prompt_ids, *plain[r.id].token_ids) for r in requests], equal

    def _decode(
        self, engine: Decodes, requests: Sequence[Request], stage: str, faults: list[str]
    ) -> dict[str, Generation]:
        """Decodes, and checks that every token is accounted for: a lost bonus is lossless."""
        done: dict[str, Generation] = {}
        for generation in engine.generate(requests):
            done[generation.id] = generation
            if len(done) % 64 == 0 or len(done) == len(requests):
                self.monitor.progress(stage, len(done), len(requests))
        total: Counters = reduce(add, (g.counters for g in done.values()))
        try:
            total.check_tokens(sum(len(g.token_ids) for g in done.values()), len(done))
        except AssertionError as error:
            faults.append(f"{stage}: {error}")
        return done

    def _windows(self, answers: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Pieces of prompts and answers, spread evenly: one more token must follow each."""
        size = self.knobs.context
        ends = [(ids, end) for ids in answers for end in range(min(size, len(ids)), len(ids) + 1)]
        picked = np.unique(np.linspace(0, len(ends) - 1, self.knobs.contexts).astype(int))
        return [ids[max(end - size, 0) : end] for ids, end in (ends[i] for i in picked)]

    def _choose(
        self, windows: Sequence[tuple[int, ...]], draft_probs: bool
    ) -> tuple[Tree, dict[Fault, int | None]]:
        """The context in which the fault that is hardest to find needs the fewest samples."""
        knobs = self.knobs
        level = knobs.alpha / 2
        margin = 1e-3 if self.target.dtype == torch.float32 else 0.1
        # Argmax drafts use no noise that they could share.
        tried = [fault for fault in Fault if draft_probs or fault is not Fault.SHARED]
        best: tuple[Tree, dict[Fault, int | None]] | None = None
        fewest = 10**7
        for number, context in enumerate(windows):
            tree = grow(
                self.target,
                self.head,
                context,
                levels=knobs.judged,
                top_k=knobs.top_k,
                temperature=knobs.temperature,
                k=knobs.k,
                draft_temperature=(knobs.draft_temperature or knobs.temperature)
                if draft_probs
                else 0.0,
            )
            self.monitor.progress("certify: contexts", number + 1, len(windows))
            if tree.margin < margin:
                continue
            joint, needed = tree.joint(), {}
            for fault in tried:
                faulty = emitted(tree, fault, knobs.k)
                needed[fault] = samples_for(POWER, joint, faulty, level, limit=fewest)
                if needed[fault] is None and best is not None:
                    break
            if best is None or None not in needed.values():
                known = [n for n in needed.values() if n is not None]
                best = tree, needed
                fewest = max(known) if len(known) == len(tried) else fewest
        if best is None:
            raise UserError(
                f"expected a context whose top {knobs.top_k} tokens stand out from the rest, found "
                f"none among {len(windows)}",
                do="give more prompts, or raise certify.contexts",
            )
        return best

    def _judge(
        self,
        tree: Tree,
        needed: dict[Fault, int | None],
        draft_probs: bool,
        faults: list[str],
    ) -> tuple[ArmResult, list[str]]:
        """Answers one context many times and tests the joint. The number is fixed beforehand."""
        knobs = self.knobs
        known = [n for n in needed.values() if n is not None]
        wanted = max(known) if len(known) == len(needed) else knobs.max_samples
        count = knobs.samples or min(max(wanted, 2000), knobs.max_samples)
        name = f"draft probabilities {'on' if draft_probs else 'off'}"
        sampling = Sampling(knobs.temperature, knobs.top_k, None, knobs.seed)
        new = 1 + knobs.judged
        requests = [
            Request(f"certify {name} {i}", tree.context, new, sampling) for i in range(count)
        ]
        drafter: Drafter = ChainDrafter(
            self.head, knobs.k, draft_probs=draft_probs, draft_temperature=knobs.draft_temperature
        )
        room = len(tree.context) + new + 2 * knobs.k + 1  # the limit caps no drafts
        engine = self.engine(self.target, drafter, batch=min(knobs.batch, count), max_length=room)
        done = self._decode(engine, requests, f"certify T>0, {name}", faults)
        joint = tree.joint()
        cells = [tree.cell(g.token_ids) for g in done.values()]
        found = g_test(np.bincount(cells, minlength=len(joint)), joint)
        arm = ArmResult(
            draft_probs=draft_probs,
            statistic=found.statistic if np.isfinite(found.statistic) else None,
            freedom=found.freedom,
            p_value=found.p_value,
            n=len(cells),
            needed={str(fault): n for fault, n in needed.items()},
        )
        return arm, _told(arm, knobs, list(done.values()), name)


def _told(
    arm: ArmResult, knobs: CertifyKnobs, generations: Sequence[Generation], name: str
) -> list[str]:
    """An arm in words."""
    shares = origins(generations, knobs.judged)
    statistic = (
        "∞ (the target cannot give some)" if arm.statistic is None else f"{arm.statistic:.1f}"
    )
    needed = "; ".join(
        f"{fault}: {'over 10,000,000' if n is None else f'{n:,}'}"
        for fault, n in arm.needed.items()
    )
    return [
        f"T = {knobs.temperature:g}, top-k {knobs.top_k}, K = {knobs.k}, {name}: G = {statistic} on "
        f"{arm.freedom} degrees of freedom, p = {arm.p_value:.2g}, {arm.n:,} samples",
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
