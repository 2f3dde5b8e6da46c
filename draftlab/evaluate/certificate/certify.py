"""The losslessness certificate (methods §5): does the engine keep the target's distribution?

At T = 0 the tokens must equal those of plain decoding. At T > 0 with top-k, a few tokens after a
context have few possible answers, whose exact probabilities follow from the target alone
(`evaluate/certificate/exact_tree.py`). The engine answers the same context many times, with and
without draft probabilities, and a G-test compares the counts with the exact probabilities. The
context is one in which known faults would show (`evaluate/certificate/contexts.py`): a head that is
always right or always wrong hides them. The token accounting and the acceptance counts must also
hold, since a decoder that drops its bonus token is lossless.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.evaluate.certificate.contexts import (
    ContextChoice,
    TreeSettings,
    choose_context,
    windows,
)
from draftlab.evaluate.certificate.gtest import g_test
from draftlab.evaluate.certificate.result import (
    DRAFT_PROBS,
    Certificate,
    CertifySettings,
    SamplingTest,
    sampling_test_lines,
    sampling_test_name,
)
from draftlab.evaluate.self_check import self_check
from draftlab.evaluate.timing import Decoder
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

__all__ = ["Certificate", "CertifySettings", "certify"]

Prompts = Sequence[tuple[str, tuple[int, ...]]]

EngineFactory = Callable[..., Decoder]
"""Called as `engine(target, drafter or None, batch=…, max_length=…)`."""

MIN_SAMPLES = 2000


def certify(
    target: Target,
    head: DraftHead,
    prompts: Prompts,
    stop_ids: frozenset[int],
    settings: CertifySettings,
    *,
    k: int,
    monitor: Monitor,
    engine: EngineFactory = Engine,
) -> Certificate:
    """Test the engine against the target alone.

    Args:
        prompts: (id, token ids) of each prompt.
        stop_ids: tokens that end an answer at T = 0; ignored at T > 0.
        k: drafts a step at T = 0.
        engine: constructor of the engine to test.

    Raises:
        UserError: there are no prompts, or no context can be tested.
    """
    if not prompts:
        raise UserError(
            "expected prompts to certify the engine on, found none",
            do="raise eval.max_prompts, or name another eval.suite",
        )
    certification = _Certification(target, head, engine, stop_ids, settings, monitor)
    return certification.run(prompts[: settings.equal_prompts], k)


@dataclass(frozen=True)
class _Certification:
    target: Target
    head: DraftHead
    engine: EngineFactory
    stop_ids: frozenset[int]
    settings: CertifySettings
    monitor: Monitor
    faults: list[str] = field(default_factory=list)

    def run(self, prompts: Prompts, k: int) -> Certificate:
        """Run all tests and return the certificate."""
        settings, exact = self.settings, self.target.dtype == torch.float32
        each = f"{settings.samples:,}" if settings.samples else f"up to {settings.max_samples:,}"
        self.monitor.say(
            f"certify: {len(prompts)} prompts at T = 0, then {len(DRAFT_PROBS)} tests at "
            f"T = {settings.temperature:g} (for any temperatures of the evaluation) with {each} "
            "short answers each; this takes minutes"
        )
        texts, equal = self._compare_greedy(prompts, k)
        dtype = str(self.target.dtype).removeprefix("torch.")
        lines = [
            f"T = 0, K = {k}, {dtype}: tokens of {equal:.1%} of {len(texts)} prompts equal plain "
            f"decoding's" + ("" if exact else " (in this dtype rounding can change tokens)")
        ]
        if exact and equal < 1:
            self.faults.append("T = 0: tokens differ from plain decoding's in float32")
        tests = []
        for draft_probs in DRAFT_PROBS:
            test, text = self._test_sampling(self._choose_context(texts, draft_probs), draft_probs)
            tests.append(test)
            lines += text
        worst = min(tests, key=lambda test: test.p_value)
        passed, has_power = not self.faults, all(test.has_power for test in tests)
        if not has_power:
            lines.append("L1 is not shown: some fault needs more samples than were drawn")
        level: Literal["L1", "L2", "L3"] = "L3"
        if passed and exact:
            level = "L1" if has_power else "L2"
        lines += [f"FAULT: {fault}" for fault in self.faults]
        lines.append(
            f"{'passed' if passed else 'FAILED'}, level {level} (every p must be at least "
            f"{settings.level:g}; a correct engine fails with probability {settings.alpha:g})"
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
            arms=tests,
            lines=lines,
        )

    def _compare_greedy(self, prompts: Prompts, k: int) -> tuple[list[tuple[int, ...]], float]:
        """Return prompts with their plain greedy answers, and the share of equal answers."""
        settings = self.settings
        requests = [
            Request(id_, ids, settings.equal_tokens, Sampling(), self.stop_ids)
            for id_, ids in prompts
        ]
        longest = max(len(request.prompt_ids) for request in requests)
        size = {
            "batch": min(len(requests), 32),
            "max_length": min(longest + settings.equal_tokens + k + 1, self.target.max_length),
        }
        plain, drafted = (
            self._decode(self.engine(self.target, drafter, **size), requests, "certify T = 0")
            for drafter in (None, new_drafter(self.head, k))
        )
        equal = np.mean([plain[r.id].token_ids == drafted[r.id].token_ids for r in requests])
        return [(*r.prompt_ids, *plain[r.id].token_ids) for r in requests], float(equal)

    def _decode(
        self, engine: Decoder, requests: Sequence[Request], stage: str
    ) -> dict[str, Generation]:
        """Return the generations by id, and add a fault if the token accounting fails."""
        by_id: dict[str, Generation] = {}
        for generation in engine.generate(requests):
            by_id[generation.id] = generation
            if len(by_id) % 64 == 0 or len(by_id) == len(requests):
                self.monitor.progress(stage, len(by_id), len(requests))
        counters = Counters.total(g.counters for g in by_id.values())
        try:
            counters.check_tokens(sum(len(g.token_ids) for g in by_id.values()), len(by_id))
        except AssertionError as error:
            self.faults.append(f"{stage}: {error}")
        return by_id

    def _choose_context(self, texts: Sequence[tuple[int, ...]], draft_probs: bool) -> ContextChoice:
        settings = self.settings
        draft_temperature = settings.draft_temperature or settings.temperature
        return choose_context(
            self.target,
            self.head,
            windows(texts, settings.context, settings.contexts),
            TreeSettings(
                levels=settings.judged,
                top_k=settings.top_k,
                temperature=settings.temperature,
                k=settings.k,
                draft_temperature=draft_temperature if draft_probs else 0.0,
            ),
            finalists=settings.finalists,
            enough=settings.enough,
            level=settings.level,
            monitor=self.monitor,
        )

    def _test_sampling(
        self, choice: ContextChoice, draft_probs: bool
    ) -> tuple[SamplingTest, list[str]]:
        """Answer one context many times and test the joint; return the test and its lines.

        The number of samples is fixed before the first one is drawn.
        """
        settings, tree, name = self.settings, choice.tree, sampling_test_name(draft_probs)
        needed = max(choice.max_needed or settings.max_samples, MIN_SAMPLES)
        count = settings.samples or min(needed, settings.max_samples)
        sampling = Sampling(settings.temperature, settings.top_k, None, settings.seed)
        new_tokens = 1 + settings.judged  # the token of the prefill, then those of verify steps
        requests = [
            Request(f"certify {name} {i}", tree.context, new_tokens, sampling) for i in range(count)
        ]
        drafter = new_drafter(
            self.head,
            settings.k,
            draft_probs=draft_probs,
            draft_temperature=settings.draft_temperature,
        )
        # long enough for the length limit not to cut drafts off
        max_length = len(tree.context) + new_tokens + 2 * settings.k + 1
        engine = self.engine(
            self.target, drafter, batch=min(settings.batch, count), max_length=max_length
        )
        generations = list(self._decode(engine, requests, f"certify T > 0, {name}").values())
        joint = tree.joint()
        cells = [tree.cell(g.token_ids) for g in generations]
        result = g_test(np.bincount(cells, minlength=len(joint)), joint)
        acceptance = self_check(generations, settings.k)
        test = SamplingTest(
            draft_probs=draft_probs,
            statistic=result.statistic if np.isfinite(result.statistic) else None,
            freedom=result.freedom,
            p_value=result.p_value,
            acceptance_p_value=acceptance.p_value if acceptance else None,
            n=len(generations),
            needed={str(fault): n for fault, n in choice.needed.items()},
        )
        if test.p_value < settings.level:
            self.faults.append(
                f"{name}: the joint distribution of {settings.judged} tokens is not the target's"
            )
        if acceptance and acceptance.p_value < settings.level:
            self.faults.append(f"{name}: drafts are not accepted as often as expected")
        return test, sampling_test_lines(test, settings, generations)
