"""Speculative sampling is lossless: the joint of three emitted tokens is the target's.

A G-test compares the joint of a small known target with the exact one (methods §5). The same test
must reject each fault that speculative decoders have had. With `-m gpu` the drafter and the
verifier run on their Triton kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from draftlab.engine import draft_sampler
from draftlab.kernels import verify as verify_module
from draftlab.kernels.sampling import sample_token
from draftlab.kernels.sampling.types import VerifyResult
from tests.helpers.gpu import on_devices
from tests.helpers.lossless import (
    ARGMAX_DRAFT_FAULTS,
    BLOCK_FAULTS,
    CASES,
    DRAFT_IDS,
    FAULTS,
    HEAD,
    TARGET,
    VOCAB,
    Case,
    K,
    assert_rejected,
    broken,
    by_definition,
    decode,
    exact_joint,
    make_drafter,
    p_value,
    propose,
    sampling_metadata,
)

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@on_devices
@each_case
def test_the_joint_of_three_tokens_is_the_targets(case: Case, device: str) -> None:
    tokens, steps = decode(case, verify_module.verify, sampling_metadata(case, device=device))
    assert p_value(tokens, exact_joint(case)) > 1e-3
    first = steps[0][1]
    if case.draft_probs:
        # A good head would hide faults.
        assert 0.5 < float(first.probability[:, 0].mean()) < 0.75
    # All ways to end a step occur, so recovered and bonus tokens are in the joint.
    assert first.accepted.unique().tolist() == [0, 1, 2]


@on_devices
@each_case
def test_expected_acceptance_is_observed(case: Case, device: str) -> None:
    """Of the drafts that were reached, as many are accepted as their probabilities predict."""
    _, steps = decode(case, verify_module.verify, sampling_metadata(case, 30_000, 1, device))
    for depth in range(K):
        surplus, variance = 0.0, 0.0
        for _, verdict in steps:
            reached = verdict.accepted >= depth
            chance = verdict.probability[reached, depth].double()
            surplus += float((verdict.accepted[reached] > depth).sum() - chance.sum())
            variance += float((chance * (1 - chance)).sum())
        assert abs(surplus) < 4 * variance**0.5


@on_devices
@each_case
def test_first_tokens_follow_p(case: Case, device: str) -> None:
    keys = sampling_metadata(case, 30_000, 2, device)
    for context in range(VOCAB):
        logits = TARGET[context].to(device).expand(30_000, VOCAB)
        tokens = sample_token(logits, torch.full((30_000,), 9 + context, device=device), keys)
        p = np.array(
            by_definition(TARGET[context].tolist(), case.temperature, case.top_k, case.top_p)
        )
        observed = tokens.bincount(minlength=VOCAB).double().cpu().numpy()
        assert observed[p == 0].sum() == 0
        assert stats.chisquare(observed[p > 0], p[p > 0] * 30_000).pvalue > 1e-4


def test_sampled_drafts_follow_q() -> None:
    case = Case(temperature=1.3)
    keys, drafter = sampling_metadata(case, 30_000), make_drafter(case)
    for context in range(VOCAB):
        last, positions = torch.full((30_000,), context), torch.full((30_000,), 3 + context)
        proposal = propose(drafter, last, positions, keys)
        tokens, distribution = proposal.tokens[:, 0], proposal.distribution
        expected = (HEAD[context].double() / 1.3).softmax(-1)
        assert distribution is not None
        q = distribution.probabilities()[:, 0]
        torch.testing.assert_close(q, expected.float().expand_as(q))
        observed = tokens.bincount(minlength=VOCAB)[DRAFT_IDS].double()
        assert int(observed.sum()) == 30_000
        assert stats.chisquare(observed.numpy(), (expected * 30_000).numpy()).pvalue > 1e-4


def test_rows_at_temperature_0_draft_their_argmax() -> None:
    case = Case(temperature=0.5)
    drafter = make_drafter(case)
    keys = sampling_metadata(case, 100)
    keys = replace(keys, temperature=torch.tensor([0.0, 1.0]).repeat(50))
    proposal = propose(drafter, torch.zeros(100, dtype=torch.int64), torch.full((100,), 3), keys)
    tokens, distribution = proposal.tokens[:, 0], proposal.distribution
    assert set(tokens[::2].tolist()) == {int(DRAFT_IDS[HEAD[0].argmax()])}
    assert distribution is not None
    assert distribution.temperature.tolist() == [0.0, 1.0] * 50
    assert len(set(tokens[1::2].tolist())) > 1


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_broken_verifiers_are_rejected(fault: tuple[str, str]) -> None:
    case = CASES["draft probabilities"]
    tokens, _ = decode(case, broken(*fault).verify, sampling_metadata(case))
    assert_rejected(tokens, exact_joint(case))


@pytest.mark.parametrize("fault", BLOCK_FAULTS.values(), ids=BLOCK_FAULTS.keys())
def test_broken_block_verifiers_are_rejected(fault: tuple[str, str]) -> None:
    case = replace(CASES["block"], temperature=1.0)
    tokens, _ = decode(case, broken(*fault).verify, sampling_metadata(case))
    assert_rejected(tokens, exact_joint(case))


def test_drafts_of_positions_noise_are_rejected_with_block_verification(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block verifier has looked at drafts behind the rejected one; a step needs new noise."""
    monkeypatch.setattr(draft_sampler, "BLOCK_STRIDE", 1)
    case = replace(CASES["block"], temperature=1.0)
    tokens, _ = decode(case, verify_module.verify, sampling_metadata(case))
    assert_rejected(tokens, exact_joint(case))


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_block_verification_accepts_more(temperature: float) -> None:
    accepted = {}
    for name in ("token", "block"):
        case = Case(temperature=temperature, verification=name)
        _, steps = decode(case, verify_module.verify, sampling_metadata(case))
        accepted[name] = steps[0][1].accepted.double()
    gain = float(accepted["block"].mean() - accepted["token"].mean())
    assert gain > 4 * (2 * float(accepted["token"].var()) / len(accepted["token"])) ** 0.5


@pytest.mark.parametrize("fault", ARGMAX_DRAFT_FAULTS.values(), ids=ARGMAX_DRAFT_FAULTS.keys())
def test_broken_verifiers_of_argmax_drafts_are_rejected(fault: tuple[str, str]) -> None:
    case = CASES["argmax drafts"]
    tokens, _ = decode(case, broken(*fault).verify, sampling_metadata(case))
    assert_rejected(tokens, exact_joint(case))


def test_a_draft_that_shares_its_noise_with_the_verifier_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = broken("Purpose.DRAFT", "Purpose.EMIT").sample_draft
    monkeypatch.setattr(draft_sampler, "sample_draft", shared)
    case = CASES["draft probabilities"]
    tokens, _ = decode(case, verify_module.verify, sampling_metadata(case))
    assert_rejected(tokens, exact_joint(case))


@on_devices
def test_draft_probabilities_5_percent_too_small_are_rejected(device: str) -> None:
    """This fault needs no change of source, so it shows the G-test's power on the kernels too."""
    case = CASES["draft probabilities"]

    def verify(*batch: Any, **options: Any) -> VerifyResult:
        *start, q, positions, keys = batch
        q = replace(q, log_sum=q.log_sum + math.log(1.05))
        return verify_module.verify(*start, q, positions, keys, **options)

    tokens, _ = decode(case, verify, sampling_metadata(case, 200_000, device=device))
    assert p_value(tokens, exact_joint(case)) < 1e-6
