"""The certificate on a target with a tiny vocabulary: correct engines pass, and at which level."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from draftlab.engine.drafter import new_drafter
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.evaluate.certificate import certify as certify_module
from draftlab.evaluate.certificate.certify import Sampled
from draftlab.evaluate.certificate.exact import build_tree, g_test, probabilities
from draftlab.evaluate.certificate.sampler import KnownModel
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target
from tests.helpers.certificates import (
    BLOCK,
    MARKOV_ROWS,
    OFF,
    ON,
    ROWS,
    SETTINGS,
    VOCAB,
    RunCertify,
    certify,
)
from tests.helpers.decoding import untrained_head
from tests.helpers.gpu import on_devices
from tests.helpers.lossless import by_definition


def test_the_correct_engine_is_certified(run_certify: RunCertify) -> None:
    rows = [ON, OFF, BLOCK, *ROWS]
    certificate = run_certify(rows=rows)
    assert (certificate.passed, certificate.level, certificate.faults) == (True, "L1", [])
    assert certificate.prompts_equal == 1.0
    assert certificate.num_tests == 2 * len(rows)
    for row, arm in zip(rows, certificate.arms, strict=True):
        assert Sampled.model_validate(arm.model_dump()) == row
        assert arm.test == f"G-test of {row.k + 1} tokens, sampler and engine, {row.name}"
        assert [test.part for test in arm.tests] == ["sampler", "engine"]
        assert arm.p_value == min(test.p_value for test in arm.tests) >= 1e-3 / 12
        for test in arm.tests:
            assert test.n == SETTINGS.samples
            assert test.freedom >= 6  # the context has many common answers
            assert 0.02 < test.acceptance < 0.98
    text = "\n".join(certificate.lines)
    for words in ("equal plain decoding's", "99 % power from", "level L1",
                  "12 tests at T > 0, so every p must be at least 8.3e-05",
                  "fails with probability 0.001"):  # fmt: skip
        assert words in text


def test_an_engine_that_cannot_be_tested_is_not_certified(
    run_certify: RunCertify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify_module, "MIN_MARGIN", math.inf)
    limited, free = run_certify(
        rows=[OFF, OFF.model_copy(update={"top_k": None})], samples=500
    ).arms
    assert (limited.level, free.level) == ("LS", "L1")
    certificate = run_certify(rows=[OFF], samples=500)
    assert (certificate.passed, certificate.level) == (True, "LS")
    assert "engine: not tested: in every context rounding could" in "\n".join(certificate.lines)


def test_without_rows_tokens_are_equal(run_certify: RunCertify) -> None:
    certificate = run_certify(rows=[])
    assert (certificate.passed, certificate.level, certificate.arms) == (True, "L2", [])
    assert (certificate.num_tests, certificate.lines[-1]) == (0, "passed, level L2")


def test_the_reference_engine_is_certified(small: Target, poor_head: Eagle3Head) -> None:
    certificate = certify(small, poor_head, (ON, OFF), engine=ReferenceEngine, samples=1000)
    assert (certificate.level, certificate.prompts_equal) == ("L1", 1.0)


def test_drafts_that_depend_on_each_other_are_certified(
    small: Target, markov_head: BlockHead
) -> None:
    certificate = certify(small, markov_head, MARKOV_ROWS)
    assert (certificate.level, certificate.prompts_equal) == ("L1", 1.0), certificate.faults


def test_of_a_16_bit_target_the_sampler_is_tested(
    small_16_bit: Target, poor_head: Eagle3Head
) -> None:
    certificate = certify(small_16_bit, poor_head, (BLOCK, OFF))
    assert (certificate.passed, certificate.level, certificate.num_tests) == (True, "LS", 2)
    assert [test.part for arm in certificate.arms for test in arm.tests] == ["sampler"] * 2
    assert "engine: not tested: in this dtype" in "\n".join(certificate.lines)


@pytest.mark.parametrize("row", [ON, BLOCK], ids=["token", "block"])
@on_devices
def test_the_false_alarm_rate_in_16_bits(small: Target, device: str, row: Sampled) -> None:
    """At a level of 5 % about 5 % of right samplers fail; ten times as many would be an error."""
    head = untrained_head(small, 2, VOCAB - 1).to(device).eval().requires_grad_(False)
    drafter = new_drafter(head.bfloat16(), row.k, verification=row.verification)
    model, failed = KnownModel(drafter, VOCAB, torch.bfloat16, row), 0
    assert {model.target.dtype, model.draft.dtype} == {torch.bfloat16}
    for seed in range(60):
        sampling = Sampling(row.temperature, row.top_k, None, seed)
        requests = [Request(str(i), model.tree.context, 1, sampling) for i in range(1000)]
        counts = model.tree.counts(model.answers(requests))
        failed += g_test(counts, model.tree.joint).p_value < 0.05
    assert failed <= 9  # P(> 9) = 0.001


@pytest.mark.parametrize("row", [ON, OFF, *ROWS])
def test_exact_probabilities_follow_the_definition(row: Sampled) -> None:
    """Every answer of two tokens has a cell, with the probabilities of the answers in it."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    p = np.array([
        by_definition(z, row.temperature, row.top_k or 0, row.top_p or 1.0) for z in table.tolist()
    ])  # fmt: skip
    np.testing.assert_allclose(probabilities(table, row)[0], p, atol=1e-6)
    tree = build_tree(lambda sequences: table[[s[-1] for s in sequences]], (0,), (1, 2), row)
    expected = np.zeros(len(tree.joint))
    for first in range(VOCAB):
        for second in range(VOCAB):
            expected += p[0, first] * p[first, second] * tree.counts([(first, second)])
    np.testing.assert_allclose(tree.joint, expected, atol=1e-6)
    assert len(tree.joint) == 5  # two answers, two cells of other tokens, impossible tokens
