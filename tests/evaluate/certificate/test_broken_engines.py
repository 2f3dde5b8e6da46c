"""Broken engines fail the certificate: samplers, verifiers, drafters and token accounting.

The broken engines are the whole engine with one piece of the verifier's source replaced.
`test_known_faults.py` tests the exact distributions behind "samples for 99 % power".
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftlab.engine.block_drafter import BlockDrafter
from draftlab.engine.generation_state import Sequence as EngineSequence
from draftlab.evaluate.certificate.certify import Sampled
from draftlab.evaluate.certificate.known_faults import Fault, known_faults
from draftlab.heads.block import BlockHead
from draftlab.kernels.sampling.types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.target_model.model import Target
from tests.helpers.broken_verifiers import faulty_verifier
from tests.helpers.certificates import (
    BLOCK,
    FEW,
    OFF,
    ON,
    ROWS,
    SETTINGS,
    VOCAB,
    RunCertify,
    certify_markov,
)
from tests.helpers.lossless import ARGMAX_DRAFT_FAULTS, broken

# Samples for 99 % power in the context that is chosen here, rounded up.
SAMPLES = {
    Fault.OFTEN: 5000,
    Fault.TARGET: 1000,
    Fault.UNCLAMPED: 1000,
    Fault.SHARED: 14_000,
    Fault.ONE_U: 2500,
    Fault.BONUS: 1000,
}
BLOCK_SAMPLES = SAMPLES | {Fault.OFTEN: 18_000, Fault.SHARED: 21_000, Fault.PREFIX: 18_000}
NOT_THE_TARGETS = "{}: the joint distribution of 3 tokens is not the target's"


@pytest.mark.parametrize(
    ("row", "fault"), [(row, fault) for row in (ON, BLOCK) for fault in known_faults(row.tree)]
)
def test_a_broken_sampler_fails(
    run_certify: RunCertify, monkeypatch: pytest.MonkeyPatch, row: Sampled, fault: Fault
) -> None:
    """The certificate itself asks for at most this many samples against the fault."""
    block = row.verification == "block"
    verifier = faulty_verifier(fault, VOCAB, range(1, VOCAB), monkeypatch, block=block)
    samples = (BLOCK_SAMPLES if block else SAMPLES)[fault]
    certificate = run_certify(verifier, [row], samples=samples)
    assert certificate.arms[0].needed[str(fault)] <= samples
    assert not certificate.passed
    assert certificate.level == "L3"
    assert NOT_THE_TARGETS.format(row.name) in certificate.faults
    assert certificate.lines[-1].startswith("FAILED")


@pytest.mark.parametrize("fault", ARGMAX_DRAFT_FAULTS.values(), ids=ARGMAX_DRAFT_FAULTS.keys())
def test_a_broken_verifier_of_argmax_drafts_fails(
    run_certify: RunCertify, fault: tuple[str, str]
) -> None:
    certificate = run_certify(broken(*fault).verify, [OFF])
    assert NOT_THE_TARGETS.format(OFF.name) in certificate.faults


def test_a_wrong_acceptance_at_temperature_zero_fails(run_certify: RunCertify) -> None:
    def accept_one_more(*arguments: Any, **options: Any) -> VerifyResult:
        result = verify(*arguments, **options)
        more = (result.accepted + 1).clamp(max=arguments[1].shape[1])
        greedy = arguments[5].temperature == 0
        return VerifyResult(more.where(greedy, result.accepted), result.emitted, result.probability)

    certificate = run_certify(accept_one_more, samples=500)
    assert certificate.prompts_equal < 1
    assert certificate.faults == ["T = 0, K = 2: tokens differ from plain decoding's in float32"]


MARK = 10.0
"""Added to the probabilities of a step whose bonus token was dropped."""


def verify_without_bonus(
    logits: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor, *rest: Any, **options: Any
) -> VerifyResult:
    """Emit only the drafts if all are accepted; this is lossless, since the next step goes on."""
    result = verify(logits, drafts, num_drafts, *rest, **options)
    full = (result.accepted == num_drafts) & (num_drafts > 0)
    last = drafts.gather(1, (result.accepted - 1).clamp(min=0)[:, None])[:, 0]
    return VerifyResult(
        result.accepted - full.long(),
        last.where(full, result.emitted),
        result.probability + MARK * full[:, None],
    )


@pytest.mark.parametrize("count_dropped", [True, False])
def test_a_dropped_bonus_is_lossless_and_still_detected(
    run_certify: RunCertify, monkeypatch: pytest.MonkeyPatch, count_dropped: bool
) -> None:
    """By token accounting, or by acceptance if the last draft is counted as the bonus token."""
    add_result = EngineSequence.add_result

    def count_step(self, tokens, accepted, num_drafts, chance, max_length, confidence):
        dropped = num_drafts > 0 and chance[0] >= MARK
        chance = [c - MARK * dropped for c in chance]
        accepted += dropped and count_dropped
        add_result(self, tokens, accepted, num_drafts, chance, max_length, confidence)

    monkeypatch.setattr(EngineSequence, "add_result", count_step)
    certificate = run_certify(verify_without_bonus, samples=2000)
    assert all(test.p_value > SETTINGS.level for test in certificate.arms)
    assert not certificate.passed
    if count_dropped:
        assert certificate.prompts_equal == 1.0
        assert certificate.faults
        assert all("token accounting" in fault for fault in certificate.faults)
    else:
        assert f"{ON.name}: drafts are not accepted as often as expected" in certificate.faults


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
    certificate = certify_markov(small, markov_head, samples=4000)
    assert [arm.passed for arm in certificate.arms] == [False, False, True, True, False]


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

    deep, shallow = run_certify(accept_the_fourth, [ROWS[0], ON], samples=6000, **FEW).arms
    assert not deep.passed
    assert shallow.passed
