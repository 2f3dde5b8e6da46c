"""The losslessness certificate (methods §5): does the engine keep the target's distribution?

At T = 0 tokens must equal plain decoding's. At T > 0, with top-k, a few tokens behind a context
have few possible answers, whose exact probabilities the target gives alone
(`evaluate/certificate/exact_tree.py`); the
engine answers the same context many times, with and without draft probabilities, and a G-test
compares. The context is one in which known faults would show (`evaluate/certificate/contexts.py`):
a head that is
always right, or always wrong, hides them. Tokens and acceptance must add up too, since a decoder
that drops its bonus is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Literal, Protocol

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.evaluate.certificate.contexts import Chosen, Sampled, choose, windows
from draftlab.evaluate.certificate.gtest import g_test
from draftlab.evaluate.certificate.result import (
    ARMS,
    ArmResult,
    Certificate,
    CertifySettings,
    arm_lines,
    arm_name,
)
from draftlab.evaluate.self_check import self_check
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

__all__ = ["Certificate", "CertifySettings", "certify"]

Prompts = Sequence[tuple[str, tuple[int, ...]]]


class Decodes(Protocol):
    """An engine."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
        """Yields each request's result as it finishes."""


EngineFactory = Callable[..., Decodes]
"""Called as `engine(target, drafter or None, batch=…, max_length=…)`."""


def certify(
    target: Target,
    head: DraftHead,
    prompts: Prompts,
    stop_ids: frozenset[int],
    settings: CertifySettings,
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

    Raises:
        UserError: without prompts, or when no context can be judged.
    """
    if not prompts:
        raise UserError("expected prompts to certify the engine on, found none")
    trial = _Trial(target, head, engine or Engine, stop_ids, settings, monitor)
    return trial.run(prompts[: settings.equal_prompts], k)


@dataclass(frozen=True)
class _Trial:
    target: Target
    head: DraftHead
    engine: EngineFactory
    stop_ids: frozenset[int]
    settings: CertifySettings
    monitor: Monitor
    faults: list[str] = field(default_factory=list)

    def run(self, prompts: Prompts, k: int) -> Certificate:
        settings, exact = self.settings, self.target.dtype == torch.float32
        each = f"{settings.samples:,}" if settings.samples else f"up to {settings.max_samples:,}"
        self.monitor.say(
            f"certify: {len(prompts)} prompts at T = 0; then, whatever temperatures are measured, "
            f"{len(ARMS)} tests at T = {settings.temperature:g}, each of {each} short answers: "
            "minutes"
        )
        texts, equal = self._greedy(prompts, k)
        dtype = str(self.target.dtype).removeprefix("torch.")
        lines = [
            f"T = 0, K = {k}, {dtype}: tokens of {equal:.1%} of {len(texts)} prompts equal plain "
            f"decoding's" + ("" if exact else " (rounding alone may part them)")
        ]
        if exact and equal < 1:
            self.faults.append("T = 0: tokens differ from plain decoding's in float32")
        arms = []
        for draft_probs in ARMS:
            arm, told = self._judge(self._choose(texts, draft_probs), draft_probs)
            arms.append(arm)
            lines += told
        worst = min(arms, key=lambda arm: arm.p_value)
        passed, strong = not self.faults, all(arm.strong for arm in arms)
        if not strong:
            lines.append("some fault needs more samples than were drawn: L1 is not shown")
        level: Literal["L1", "L2", "L3"] = "L3"
        if passed and exact:
            level = "L1" if strong else "L2"
        lines += [f"FAULT: {fault}" for fault in self.faults]
        lines.append(
            f"{'passed' if passed else 'FAILED'}, level {level} (each p must reach "
            f"{settings.level:g}: {settings.alpha:g} of right engines fail)"
        )
        return Certificate(
            level=level,
            test=f"G-test of {settings.judged} tokens at T = {settings.temperature:g}, "
            f"top-k {settings.top_k}, K = {settings.k}; tokens at T = 0",
            statistic=worst.statistic,
            p_value=worst.p_value,
            n=worst.n,
            n_for_99_power=worst.n_for_99_power,
            prompts_equal=equal,
            passed=passed,
            faults=self.faults,
            arms=arms,
            lines=lines,
        )

    def _greedy(self, prompts: Prompts, k: int) -> tuple[list[tuple[int, ...]], float]:
        """Prompts with their plain answers, and the share the speculative engine answers alike."""
        settings = self.settings
        requests = [
            Request(id_, ids, settings.equal_tokens, Sampling(), self.stop_ids)
            for id_, ids in prompts
        ]
        longest = max(len(request.prompt_ids) for request in requests)
        room = min(longest + settings.equal_tokens + k + 1, self.target.max_length)
        found = []
        for drafter in (None, new_drafter(self.head, k)):
            engine = self.engine(
                self.target, drafter, batch=min(len(requests), 32), max_length=room
            )
            found.append(self._decode(engine, requests, "certify T = 0"))
        plain, drafted = found
        equal = np.mean([plain[r.id].token_ids == drafted[r.id].token_ids for r in requests])
        return [(*r.prompt_ids, *plain[r.id].token_ids) for r in requests], float(equal)

    def _decode(
        self, engine: Decodes, requests: Sequence[Request], stage: str
    ) -> dict[str, Generation]:
        """Generations by id; every token must be accounted for."""
        done: dict[str, Generation] = {}
        for generation in engine.generate(requests):
            done[generation.id] = generation
            if len(done) % 64 == 0 or len(done) == len(requests):
                self.monitor.progress(stage, len(done), len(requests))
        total: Counters = reduce(add, (g.counters for g in done.values()))
        try:
            total.check_tokens(sum(len(g.token_ids) for g in done.values()), len(done))
        except AssertionError as error:
            self.faults.append(f"{stage}: {error}")
        return done

    def _choose(self, texts: Sequence[tuple[int, ...]], draft_probs: bool) -> Chosen:
        settings = self.settings
        heat = (settings.draft_temperature or settings.temperature) if draft_probs else 0.0
        return choose(
            self.target,
            self.head,
            windows(texts, settings.context, settings.contexts),
            Sampled(settings.judged, settings.top_k, settings.temperature, settings.k, heat),
            finalists=settings.finalists,
            enough=settings.enough,
            level=settings.level,
            monitor=self.monitor,
        )

    def _judge(self, chosen: Chosen, draft_probs: bool) -> tuple[ArmResult, list[str]]:
        """Answers one context many times and tests the joint. The number is fixed beforehand."""
        settings, tree, name = self.settings, chosen.tree, arm_name(draft_probs)
        wanted = max(chosen.hardest or settings.max_samples, 2000)
        count = settings.samples or min(wanted, settings.max_samples)
        sampling = Sampling(settings.temperature, settings.top_k, None, settings.seed)
        new = 1 + settings.judged  # the prefill's token, then those of verify steps
        requests = [
            Request(f"certify {name} {i}", tree.context, new, sampling) for i in range(count)
        ]
        drafter = new_drafter(
            self.head,
            settings.k,
            draft_probs=draft_probs,
            draft_temperature=settings.draft_temperature,
        )
        room = len(tree.context) + new + 2 * settings.k + 1  # the limit must cap no drafts
        engine = self.engine(
            self.target, drafter, batch=min(settings.batch, count), max_length=room
        )
        done = list(self._decode(engine, requests, f"certify T > 0, {name}").values())
        joint = tree.joint()
        seen = np.bincount([tree.cell(g.token_ids) for g in done], minlength=len(joint))
        found, accepted = g_test(seen, joint), self_check(done, settings.k)
        arm = ArmResult(
            draft_probs=draft_probs,
            statistic=found.statistic if np.isfinite(found.statistic) else None,
            freedom=found.freedom,
            p_value=found.p_value,
            acceptance_p_value=accepted.p_value if accepted else None,
            n=len(done),
            needed={str(fault): n for fault, n in chosen.needed.items()},
        )
        if arm.p_value < settings.level:
            self.faults.append(f"{name}: the joint of {settings.judged} tokens is not the target's")
        if accepted and accepted.p_value < settings.level:
            self.faults.append(f"{name}: drafts are not accepted as often as they should be")
        return arm, arm_lines(arm, settings, done)
