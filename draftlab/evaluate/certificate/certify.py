"""The losslessness certificate (methods §5): does the engine keep the target's distribution?

At T = 0 the tokens must equal those of plain decoding. At T > 0 every row of the report is tested
with its own temperature, K, drafts and limits: the engine answers one context many times, and a
G-test compares the first tokens with their exact probabilities, which follow from the target alone
(`evaluate/certificate/exact_tree.py`). The context is one in which known faults would show
(`evaluate/certificate/contexts.py`): a head that is always right or always wrong hides them. The
token accounting and the acceptance counts must also hold, since a decoder that drops its bonus
token is lossless.

In 16 bits an engine's logits depend on the shape of the batch, so its tokens have no exact
distribution. There the sampler and the verifier are tested on the target's own logits
(`evaluate/certificate/sampler.py`), which leaves the numerics of the target out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.evaluate.certificate.contexts import ContextChoice, choose_context, windows
from draftlab.evaluate.certificate.exact_tree import TreeSettings
from draftlab.evaluate.certificate.gtest import g_test
from draftlab.evaluate.certificate.result import (
    LEVELS,
    Certificate,
    CertifySettings,
    Level,
    Sampled,
    SamplingTest,
    sampling_test_lines,
)
from draftlab.evaluate.certificate.sampler import TableSampler
from draftlab.evaluate.self_check import self_check
from draftlab.evaluate.timing import Decoder
from draftlab.formatting import count_text
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

__all__ = ["Certificate", "CertifySettings", "Sampled", "certify"]

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
    rows: Sequence[Sampled],
    monitor: Monitor,
    engine: EngineFactory = Engine,
) -> Certificate:
    """Test the engine against the target alone.

    Args:
        prompts: (id, token ids) of each prompt.
        stop_ids: tokens that end an answer at T = 0; ignored at T > 0.
        k: drafts a step at T = 0.
        rows: how the rows at T > 0 are sampled; each is tested.
        engine: constructor of the engine to test.

    Raises:
        UserError: there are no prompts.
    """
    if not prompts:
        raise UserError(
            "expected prompts to certify the engine on, found none",
            do="raise eval.max_prompts, or name another eval.suite",
        )
    certification = _Certification(target, head, engine, stop_ids, settings, monitor)
    return certification.run(prompts[: settings.equal_prompts], k, rows)


@dataclass(frozen=True)
class _Certification:
    target: Target
    head: DraftHead
    engine: EngineFactory
    stop_ids: frozenset[int]
    settings: CertifySettings
    monitor: Monitor
    faults: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the engine's tokens have an exact distribution."""
        return self.target.dtype == torch.float32

    def run(self, prompts: Prompts, k: int, rows: Sequence[Sampled]) -> Certificate:
        """Run all tests and return the certificate."""
        settings, dtype = self.settings, str(self.target.dtype).removeprefix("torch.")
        each = f"{settings.samples:,}" if settings.samples else f"up to {settings.max_samples:,}"
        then = (
            f", then {count_text(len(rows), 'row')} at T > 0 with {each} short answers each; this "
            "takes minutes"
        )
        self.monitor.say(f"certify: {len(prompts)} prompts at T = 0{then * bool(rows)}")
        texts, equal = self._compare_greedy(prompts, k)
        rounding = "" if self.exact else " (in this dtype rounding can change tokens)"
        lines = [
            f"T = 0, K = {k}, {dtype}: tokens of {equal:.1%} of {len(texts)} prompts equal plain "
            f"decoding's{rounding}"
        ]
        if self.exact and equal < 1:
            self.faults.append(f"T = 0, K = {k}: tokens differ from plain decoding's in float32")
        tests: list[SamplingTest] = []
        for row in rows:
            try:
                choice = self._choose_context(texts, row.tree)
            except UserError as error:  # hours of counts must not be lost for it
                lines.append(f"{row.name}: not tested: {error.what}")
                continue
            tests.append(self._test_sampling(choice, row))
            lines += sampling_test_lines(tests[-1])
        passed = not self.faults
        levels = [test.level for test in tests]
        if len(tests) < len(rows) or not rows:  # of a row that was not tested nothing is shown
            levels.append(self._level(False))
        level = min(levels, key=LEVELS.index)
        lines += [f"FAULT: {fault}" for fault in self.faults]
        lines.append(
            f"{'passed' if passed else 'FAILED'}, level {level if passed else 'L3'} (every p must "
            f"be at least {settings.level:g}; a correct engine fails with probability "
            f"{settings.alpha:g})"
        )
        return Certificate(
            level=level if passed else "L3",
            prompts_equal=equal,
            passed=passed,
            faults=self.faults,
            arms=tests,
            lines=lines,
        )

    def _level(self, has_power: bool) -> Level:
        """Return the level of a row whose tests passed."""
        if self.exact:
            return "L1" if has_power else "L2"
        return "LS" if has_power else "L3"

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
        plain = self._decode(
            self.engine(self.target, None, **size), requests, "certify T = 0, no drafting"
        )
        engine = self.engine(self.target, new_drafter(self.head, k), **size)
        drafted = self._decode(engine, requests, f"certify T = 0, K = {k}")
        equal = [plain[r.id].token_ids == drafted[r.id].token_ids for r in requests]
        texts = [(*r.prompt_ids, *plain[r.id].token_ids) for r in requests]
        return texts, float(np.mean(equal))

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

    def _choose_context(
        self, texts: Sequence[tuple[int, ...]], tree: TreeSettings
    ) -> ContextChoice:
        settings = self.settings
        return choose_context(
            self.target,
            self.head,
            windows(texts, settings.context, settings.contexts),
            tree,
            finalists=settings.finalists,
            enough=settings.enough,
            level=settings.level,
            monitor=self.monitor,
        )

    def _test_sampling(self, choice: ContextChoice, row: Sampled) -> SamplingTest:
        """Answer one context many times and test the joint.

        The number of samples is fixed before the first one is drawn.
        """
        settings, tree = self.settings, choice.tree
        needed = max(choice.max_needed or settings.max_samples, MIN_SAMPLES)
        count = settings.samples or min(needed, settings.max_samples)
        sampling = Sampling(row.temperature, row.top_k, row.top_p, settings.seed)
        new_tokens = 1 + tree.settings.levels  # the token of the prefill, then the tested ones
        requests = [
            Request(f"certify {row.name} {i}", tree.context, new_tokens, sampling)
            for i in range(count)
        ]
        generations: list[Generation] = []
        if self.exact:
            generations = self._engine_answers(requests, row)
            answers = [generation.token_ids for generation in generations]
        else:
            sampler, size = TableSampler(tree), settings.batch
            chunks = (requests[start : start + size] for start in range(0, count, size))
            answers = [answer for chunk in chunks for answer in sampler.answers(chunk)]
        joint = tree.joint()
        cells = [tree.cell(answer) for answer in answers]
        result = g_test(np.bincount(cells, minlength=len(joint)), joint)
        acceptance = self_check(generations, row.k) if generations else None
        num_faults = len(self.faults)
        if result.p_value < settings.level:
            self.faults.append(
                f"{row.name}: the joint distribution of {tree.settings.levels} tokens is not the "
                "target's"
            )
        if acceptance and acceptance.p_value < settings.level:
            self.faults.append(f"{row.name}: drafts are not accepted as often as expected")
        dtype = str(self.target.dtype).removeprefix("torch.")
        what = "engine" if self.exact else f"sampler and verifier on the target's {dtype} logits"
        test = SamplingTest(
            **vars(row),
            level="L3",
            test=f"G-test of {tree.settings.levels} tokens, {what}, {row.name}",
            passed=len(self.faults) == num_faults,
            statistic=result.statistic if np.isfinite(result.statistic) else None,
            freedom=result.freedom,
            p_value=result.p_value,
            acceptance_p_value=acceptance.p_value if acceptance else None,
            n=len(answers),
            needed={str(fault): n for fault, n in choice.needed.items()},
        )
        if self.faults:
            return test
        return test.model_copy(update={"level": self._level(test.has_power)})

    def _engine_answers(self, requests: Sequence[Request], row: Sampled) -> list[Generation]:
        drafter = new_drafter(
            self.head,
            row.k,
            draft_probs=row.draft_probs,
            draft_temperature=row.draft_temperature,
            verification=row.verification,
        )
        # Long enough for the length limit not to cut drafts off.
        longest = len(requests[0].prompt_ids) + requests[0].max_new_tokens + 2 * row.k + 1
        batch = min(self.settings.batch, len(requests))
        size = {"batch": batch, "max_length": longest}
        engine = self.engine(self.target, drafter, **size)
        return list(self._decode(engine, requests, f"certify {row.name}").values())
