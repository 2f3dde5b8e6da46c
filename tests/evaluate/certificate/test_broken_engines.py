"""Broken samplers and engines fail the certificate.

They are the real ones with one piece of the verifier's source replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from draftlab.engine import draft_sampler
from draftlab.engine.block_drafter import BlockDrafter
from draftlab.evaluate.certificate import sampler as sampler_module
from draftlab.evaluate.certificate.certify import Sampled
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target
from tests.helpers.certificates import (
    BLOCK,
    MARKOV_ROWS,
    OFF,
    ON,
    ROWS,
    VOCAB,
    RunCertify,
    certify,
)
from tests.helpers.lossless import ARGMAX_DRAFT_FAULTS, BLOCK_FAULTS, FAULTS, broken

SHARED = "draft and residual share noise"
TOKEN_SOURCES = FAULTS | {SHARED: None}
BLOCK_SOURCES = BLOCK_FAULTS | {
    "the first draft is accepted 5 % too often": (
        "(reach[-1] * p_draft[:, depth] / q_draft[:, depth])",
        "((1.05 if depth == 0 else 1) * reach[-1] * p_draft[:, depth] / q_draft[:, depth])",
    ),
    "residual is p": FAULTS["residual is p"],
    "residual is |p − q|": (
        "(scale * p_next - q_next).clamp(min=0)",
        "(scale * p_next - q_next).abs()",
    ),
    "bonus from q": FAULTS["bonus from q"],
    SHARED: (
        "emission_noise(rows, positions + accepted, vocab)",
        "emission_noise(rows, (positions - 2) * BLOCK_STRIDE + 2 + accepted, vocab)",
    ),
}
CASES = [
    (row, name, source)
    for row, sources in ((ON, TOKEN_SOURCES), (OFF, ARGMAX_DRAFT_FAULTS), (BLOCK, BLOCK_SOURCES))
    for name, source in sources.items()
]


def faulty_verifier(
    source: tuple[str, str] | None,
    name: str,
    vocab_size: int,
    draft_ids: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., VerifyResult]:
    """Return a verifier with the fault; for shared noise the drafter is patched too.

    Args:
        draft_ids: target ids of the draft vocabulary, so that a token has the same noise in the
            draft and in the residual.
    """
    verifier = broken(*source).verify if source else verify
    if name == SHARED:
        shared = f"Purpose.EMIT, {vocab_size})[..., torch.tensor({list(draft_ids)})]"
        module = broken("Purpose.DRAFT, logits.shape[-1])", shared)
        monkeypatch.setattr(draft_sampler, "sample_draft", module.sample_draft)
    return verifier


@pytest.mark.parametrize(
    ("row", "name", "source"), CASES, ids=[f"{row.name}: {name}" for row, name, _ in CASES]
)
def test_a_broken_sampler_fails(
    small_16_bit: Target,
    poor_head: Eagle3Head,
    monkeypatch: pytest.MonkeyPatch,
    row: Sampled,
    name: str,
    source: tuple[str, str] | None,
) -> None:
    """With the samples that a user's certificate draws."""
    verifier = faulty_verifier(source, name, VOCAB, range(1, VOCAB), monkeypatch)
    monkeypatch.setattr(sampler_module, "verify", verifier)
    certificate = certify(small_16_bit, poor_head, [row], samples=20_000)
    assert (certificate.passed, certificate.level) == (False, "L3")
    assert certificate.faults == [
        f"{row.name}: sampler: the joint distribution of 3 tokens is not the known model's"
    ]
    assert certificate.lines[-1].startswith("FAILED")


@pytest.mark.parametrize("name", ["residual is p", "one u a step", "bonus from the row before"])
def test_a_broken_engine_fails(run_certify: RunCertify, name: str) -> None:
    """Around a right sampler."""
    certificate = run_certify(broken(*FAULTS[name]).verify, [ON])
    assert certificate.level == "L3"
    assert certificate.faults == [
        f"{ON.name}: engine: the joint distribution of 3 tokens is not the target's"
    ]


def test_a_wrong_acceptance_at_temperature_zero_fails(run_certify: RunCertify) -> None:
    def accept_one_more(*arguments: Any, **options: Any) -> VerifyResult:
        result = verify(*arguments, **options)
        more = (result.accepted + 1).clamp(max=arguments[1].shape[1])
        greedy = arguments[5].temperature == 0
        return VerifyResult(more.where(greedy, result.accepted), result.emitted, result.probability)

    certificate = run_certify(accept_one_more, samples=500)
    assert certificate.prompts_equal < 1
    assert certificate.faults == ["T = 0, K = 2: tokens differ from plain decoding's in float32"]


def test_draft_probabilities_without_the_markov_bias_fail(
    small: Target, markov_head: BlockHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts are drawn with the bias and verified as if they were drawn without."""
    right = BlockDrafter._draw

    def unbiased(self: Any, outputs: Any, *rest: Any) -> Any:
        proposal = right(self, outputs, *rest)
        logits = self.head.lm_head(self.head.normed(outputs))
        q = proposal.distribution
        if q is None:
            return proposal
        log_sum = (logits / q.temperature[:, None, None]).logsumexp(-1)
        return replace(proposal, distribution=replace(q, logits=logits, log_sum=log_sum))

    monkeypatch.setattr(BlockDrafter, "_draw", unbiased)
    certificate = certify(small, markov_head, MARKOV_ROWS, samples=1000)  # p is below 1e-99
    assert [arm.passed for arm in certificate.arms] == [False, True, False]


def test_a_fault_of_the_fourth_draft_fails_rows_with_four_drafts(run_certify: RunCertify) -> None:
    """A test at K = 2 does not reach it."""

    def accept_the_fourth(*arguments: Any, **options: Any) -> VerifyResult:
        result = verify(*arguments, **options)
        bonus_logits, rows = arguments[0][:, -1], arguments[5]
        if arguments[1].shape[1] < 4 or not bool((rows.temperature > 0).all()):
            return result
        more = result.accepted == 3
        emitted = bonus_logits.argmax(-1).where(more, result.emitted)
        return VerifyResult(result.accepted + more.long(), emitted, result.probability)

    deep, shallow = run_certify(accept_the_fourth, [ROWS[0], ON], samples=6000).arms
    assert not deep.passed
    assert shallow.passed
