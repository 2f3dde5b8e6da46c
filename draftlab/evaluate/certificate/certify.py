"""The losslessness certificate (methods §5): does the engine keep the target's distribution?

At T = 0 the tokens must equal those of plain decoding. At T > 0 every row of the report is tested
with its own temperature, K, drafts and limits, in two G-tests of the joint of the first tokens:

- sampler: the drafter's choice of tokens and the verifier decode a model whose distribution is
  known (`evaluate/certificate/sampler.py`);
- engine: the whole engine answers one context many times, and the exact probabilities follow from
  the target alone (`evaluate/certificate/exact.py`).

In 16 bits an engine's logits depend on the shape of the batch, so its tokens have no exact
distribution, and only the sampler is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import HeadDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.certificate.exact import (
    MIN_MARGIN,
    AnswerTree,
    build_tree,
    detectable,
    g_test,
)
from draftlab.evaluate.certificate.result import (
    LEVELS,
    Certificate,
    JointTest,
    Level,
    Sampled,
    SamplingTest,
)
from draftlab.evaluate.certificate.sampler import KnownModel
from draftlab.evaluate.timing import Decoder
from draftlab.formatting import count_text
from draftlab.heads.head import DraftHead
from draftlab.progress import Monitor
from draftlab.target_model.model import Target

__all__ = ["Certificate", "Certification", "CertifySettings", "Sampled"]

Prompts = Sequence[tuple[str, tuple[int, ...]]]

EngineFactory = Callable[..., Decoder]
"""Called as `engine(target, drafter or None, batch=…, max_length=…)`."""

ALPHA = 1e-3
"""Probability that a correct engine fails in any test at T > 0."""


@dataclass(frozen=True)
class CertifySettings:
    """The size of the certificate.

    Attributes:
        num_rows: rows at T > 0 of the whole report, whose tests share `ALPHA`.
        seed: of the sampling noise.
        samples: of each test at T > 0; fixed before the first one is drawn.
        contexts: contexts of which the one with the most even answers is tested.
        context: largest length of a context in tokens; a short one is cheap to sample from.
        batch: requests decoded at once.
        prompts, tokens: prompts that are compared at T = 0, and the tokens of an answer.
    """

    num_rows: int = 1
    seed: int = 0
    samples: int = 20_000
    contexts: int = 32
    context: int = 24
    batch: int = 256
    prompts: int = 32
    tokens: int = 64


@dataclass(frozen=True)
class Certification:
    """The tests of an engine with a head against the target alone.

    Attributes:
        stop_ids: tokens that end an answer at T = 0; ignored at T > 0.
        engine: constructor of the engine to test.
        faults: what the tests have found so far.
    """

    target: Target
    head: DraftHead
    stop_ids: frozenset[int]
    settings: CertifySettings
    monitor: Monitor
    engine: EngineFactory = Engine
    faults: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the engine's tokens have an exact distribution."""
        return self.target.dtype == torch.float32

    @property
    def num_tests(self) -> int:
        """Tests at T > 0 of the whole report."""
        return (1 + self.exact) * self.settings.num_rows

    @property
    def level(self) -> float:
        """Level of each test (Bonferroni)."""
        return ALPHA / self.num_tests

    def run(self, prompts: Prompts, k: int, rows: Sequence[Sampled]) -> Certificate:
        """Run all tests and return the certificate.

        Args:
            prompts: (id, token ids) of each prompt, of which the first are compared.
            k: drafts a step at T = 0.
            rows: how the rows at T > 0 are sampled; each is tested.
        """
        prompts = prompts[: self.settings.prompts]
        dtype = str(self.target.dtype).removeprefix("torch.")
        then = (
            f", then {count_text(len(rows), 'row')} at T > 0 with {self.settings.samples:,} short "
            "answers a test; this takes minutes"
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
        arms: list[SamplingTest] = []
        for row in rows:
            arms.append(self._test_row(row, texts))
            lines += [f"{row.name}: {arms[-1].level}"]
            lines += [test.line(len(row.widths)) for test in arms[-1].tests]
            if len(arms[-1].tests) == 1:
                why = "in this dtype its logits depend on the shape of the batch"
                if self.exact:
                    why = "in every context rounding could change the tokens that top-k or top-p "
                    why += "allow"
                lines.append(f"  engine: not tested: {why}")
        passed = not self.faults
        greedy: Level = "L2" if self.exact else "L3"
        level = min((arm.level for arm in arms), key=LEVELS.index, default=greedy)
        level = level if passed else "L3"
        lines += [f"FAULT: {fault}" for fault in self.faults]
        lines.append(f"{'passed' if passed else 'FAILED'}, level {level}")
        if rows:
            lines[-1] += (
                f" (the report has {count_text(self.num_tests, 'test')} at T > 0, so every p must "
                f"be at least {self.level:.2g}; a correct engine fails with probability {ALPHA:g})"
            )
        return Certificate(
            level=level,
            prompts_equal=equal,
            passed=passed,
            faults=self.faults,
            num_tests=self.num_tests,
            arms=arms,
            lines=lines,
        )

    def _compare_greedy(self, prompts: Prompts, k: int) -> tuple[list[tuple[int, ...]], float]:
        """Return prompts with their plain greedy answers, and the share of equal answers."""
        tokens = self.settings.tokens
        requests = [Request(id_, ids, tokens, Sampling(), self.stop_ids) for id_, ids in prompts]
        longest = max(len(request.prompt_ids) for request in requests)
        max_length = min(longest + tokens + k + 1, self.target.max_length)
        plain = self._decode(None, requests, max_length, "certify T = 0, no drafting")
        drafter = new_drafter(self.head, k)
        drafted = self._decode(drafter, requests, max_length, f"certify T = 0, K = {k}")
        equal = [plain[r.id].token_ids == drafted[r.id].token_ids for r in requests]
        texts = [(*r.prompt_ids, *plain[r.id].token_ids) for r in requests]
        return texts, float(np.mean(equal))

    def _decode(
        self, drafter: HeadDrafter | None, requests: Sequence[Request], max_length: int, stage: str
    ) -> dict[str, Generation]:
        """Return the generations by id."""
        batch = min(self.settings.batch, len(requests))
        engine = self.engine(self.target, drafter, batch=batch, max_length=max_length)
        by_id: dict[str, Generation] = {}
        for generation in engine.generate(requests):
            by_id[generation.id] = generation
            if len(by_id) % 64 == 0 or len(by_id) == len(requests):
                self.monitor.progress(stage, len(by_id), len(requests))
        return by_id

    def _test_row(self, row: Sampled, texts: Sequence[tuple[int, ...]]) -> SamplingTest:
        """Test the sampler, and the engine where its tokens have an exact distribution."""
        drafter = new_drafter(
            self.head, row.k, draft_probs=row.draft_probs, verification=row.verification
        )
        tests = [self._test_sampler(row, drafter)]
        tree = self._choose_context(row, texts) if self.exact else None
        if tree:
            tests.append(self._test_engine(row, drafter, tree))
        passed = all(test.passed for test in tests)
        level: Level = "L1" if tree else "LS"
        parts = " and ".join(test.part for test in tests)
        return SamplingTest(
            **vars(row),
            level=level if passed and not self.faults else "L3",
            test=f"G-test of {len(row.widths)} tokens, {parts}, {row.name}",
            passed=passed,
            p_value=min(test.p_value for test in tests),
            n=self.settings.samples,
            tests=tests,
        )

    def _requests(self, row: Sampled, context: tuple[int, ...], tokens: int) -> list[Request]:
        sampling = Sampling(row.temperature, row.top_k, row.top_p, self.settings.seed)
        ids = (f"certify {row.name} {i}" for i in range(self.settings.samples))
        return [Request(id_, context, tokens, sampling) for id_ in ids]

    def _test_sampler(self, row: Sampled, drafter: HeadDrafter) -> JointTest:
        model = KnownModel(drafter, self.target.vocab_size, self.target.dtype, row)
        requests, size = self._requests(row, model.tree.context, 1), self.settings.batch
        answers: list[list[int]] = []
        for start in range(0, len(requests), size):
            answers += model.answers(requests[start : start + size])
            self.monitor.progress(f"certify sampler, {row.name}", len(answers), len(requests))
        return self._joint_test("sampler", row, model.tree, answers, model.accepted / model.drafted)

    def _test_engine(self, row: Sampled, drafter: HeadDrafter, tree: AnswerTree) -> JointTest:
        new_tokens = len(row.widths) + 1  # the token of the prefill, then the tested ones
        requests = self._requests(row, tree.context, new_tokens)
        # Long enough for the length limit not to cut drafts off.
        max_length = len(tree.context) + new_tokens + 2 * row.k + 1
        stage = f"certify engine, {row.name}"
        generations = self._decode(drafter, requests, max_length, stage).values()
        counters = Counters.total(generation.counters for generation in generations)
        acceptance = counters.accepted / max(counters.draft_tokens, 1)
        answers = [generation.token_ids for generation in generations]
        return self._joint_test("engine", row, tree, answers, acceptance)

    def _joint_test(
        self,
        part: str,
        row: Sampled,
        tree: AnswerTree,
        answers: Iterable[Sequence[int]],
        acceptance: float,
    ) -> JointTest:
        counts = tree.counts(answers)
        result, n = g_test(counts, tree.joint), int(counts.sum())
        if result.p_value < self.level:
            self.faults.append(
                f"{row.name}: {part}: the joint distribution of {len(row.widths)} tokens is not "
                f"the {'known model' if part == 'sampler' else 'target'}'s"
            )
        return JointTest(
            part=part,
            passed=result.p_value >= self.level,
            statistic=result.statistic if np.isfinite(result.statistic) else None,
            freedom=result.freedom,
            p_value=result.p_value,
            n=n,
            detectable=detectable(n, result.freedom, self.level),
            acceptance=acceptance,
        )

    def _choose_context(self, row: Sampled, texts: Sequence[tuple[int, ...]]) -> AnswerTree | None:
        """Return the tree with the most even answers, in which faults can show.

        None: rounding could change the possible tokens in every context.
        """

        def next_logits(sequences: list[tuple[int, ...]]) -> torch.Tensor:
            states = self.target.states(torch.tensor(sequences, device=self.target.device))
            return self.target.logits(states.last[:, -1]).to(self.target.dtype)

        contexts = windows(texts, self.settings.context, self.settings.contexts)
        best: AnswerTree | None = None
        for number, context in enumerate(contexts, 1):
            # The prefill emits the first token, so only its likeliest is followed.
            tree = build_tree(next_logits, context, (1, *row.widths), row)
            if tree.margin >= MIN_MARGIN and (best is None or tree.entropy > best.entropy):
                best = tree
            self.monitor.progress("certify: contexts", number, len(contexts))
        return best


def windows(texts: Sequence[tuple[int, ...]], size: int, count: int) -> list[tuple[int, ...]]:
    """Return at most `count` windows of `size` tokens, spread evenly over the texts.

    A text that is shorter than `size` is one window.
    """
    ends = [(ids, end) for ids in texts for end in range(min(size, len(ids)), len(ids) + 1)]
    picked = np.unique(np.linspace(0, len(ends) - 1, count).astype(int))
    return [ids[max(end - size, 0) : end] for ids, end in (ends[i] for i in picked)]
