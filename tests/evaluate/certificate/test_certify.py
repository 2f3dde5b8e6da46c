"""The certificate on a target with a tiny vocabulary: correct engines pass, and at which level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.evaluate.certificate import certify as certify_module
from draftlab.evaluate.certificate import sampler as sampler_module
from draftlab.evaluate.certificate.certify import Certificate, Sampled, certify
from draftlab.evaluate.certificate.contexts import trees
from draftlab.evaluate.certificate.gtest import g_test
from draftlab.evaluate.certificate.known_faults import Fault, emitted_distribution, known_faults
from draftlab.evaluate.certificate.sampler import TableSampler
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.certificates import (
    BLOCK,
    FEW,
    OFF,
    ON,
    PROMPTS,
    ROWS,
    SETTINGS,
    VOCAB,
    RunCertify,
    certify_markov,
)
from tests.helpers.decoding import untrained_head
from tests.helpers.gpu import on_devices
from tests.helpers.lossless import FAULTS, broken


def test_the_correct_engine_is_certified(run_certify: RunCertify) -> None:
    certificate = run_certify()
    assert (certificate.passed, certificate.level, certificate.faults) == (True, "L1", [])
    assert certificate.prompts_equal == 1.0
    sampled, argmax = certificate.arms
    assert (sampled.draft_probs, argmax.draft_probs) == (True, False)
    for test in certificate.arms:
        assert test.n_for_99_power is not None
        assert test.n >= max(test.n_for_99_power, 2000)
        assert test.freedom >= 16  # the context has many common answers
        assert test.acceptance_p_value is not None
    token_faults = set(map(str, Fault)) - {str(Fault.PREFIX)}
    assert set(sampled.needed) == token_faults
    assert set(argmax.needed) == token_faults - {str(Fault.SHARED)}
    text = "\n".join(certificate.lines)
    for words in ("equal plain decoding's", "(drafts at T = 0.7)", "samples for 99 % power",
                  "level L1", "fails with probability 0.001"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_few_samples_pass_without_level_l1(run_certify: RunCertify, seed: int) -> None:
    certificate = run_certify(seed=seed, samples=1000)
    assert certificate.passed
    assert certificate.level == "L2"
    assert any("L1 and LS are not shown" in line for line in certificate.lines)


def test_of_a_row_that_cannot_be_tested_nothing_is_shown(
    run_certify: RunCertify, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = certify_module.choose_context

    def choose(target: Target, head: Eagle3Head, contexts: Any, tree: Any, **options: Any) -> Any:
        if tree.draft_temperature == 0:  # OFF
            raise UserError("rounding could change the possible tokens in every context")
        return usual(target, head, contexts, tree, **options)

    monkeypatch.setattr(certify_module, "choose_context", choose)
    certificate = run_certify()
    assert [arm.level for arm in certificate.arms] == ["L1"]
    assert (certificate.passed, certificate.level) == (True, "L2")
    assert f"{OFF.name}: not tested: rounding could" in "\n".join(certificate.lines)


def test_the_reference_engine_is_certified(small: Target, poor_head: Eagle3Head) -> None:
    settings = SETTINGS.model_copy(update={"samples": 1000})
    certificate = certify(
        small, poor_head, PROMPTS, frozenset(), settings, k=2, rows=(ON, OFF), monitor=Monitor(),
        engine=ReferenceEngine,
    )  # fmt: skip
    assert (certificate.passed, certificate.prompts_equal) == (True, 1.0)


def test_block_verification_is_certified(run_certify: RunCertify) -> None:
    certificate = run_certify(rows=[BLOCK])
    assert (certificate.passed, certificate.level, certificate.faults) == (True, "L1", [])
    (block,) = certificate.arms
    assert block.row == BLOCK
    assert "block verification" in block.test
    assert set(block.needed) == set(map(str, Fault)) - {str(Fault.ONE_U)}
    one_draft = known_faults(replace(BLOCK, k=1).tree)
    assert set(map(str, one_draft)) == set(block.needed) - {str(Fault.PREFIX)}


def test_drafts_that_depend_on_each_other_are_certified(
    small: Target, markov_head: BlockHead
) -> None:
    certificate = certify_markov(small, markov_head, samples=4000)
    assert (certificate.passed, certificate.prompts_equal) == (True, 1.0), certificate.faults
    arms = [(arm.temperature, arm.draft_probs) for arm in certificate.arms]
    assert arms == [(0.8, True), (1.5, True), (0.8, False), (1.5, False), (0.8, True)]
    for arm in certificate.arms:
        assert arm.freedom >= 16 or arm.k == 1
        assert arm.acceptance_p_value is not None


def test_every_row_is_tested_with_its_own_sampling(run_certify: RunCertify) -> None:
    certificate = run_certify(rows=ROWS, samples=2000, num_rows=3, **FEW)
    assert certificate.passed
    for row, arm in zip(ROWS, certificate.arms, strict=True):
        assert vars(row).items() <= arm.model_dump().items()
        assert arm.test == f"G-test of {row.k + 1} tokens, engine, {row.name}"
        assert arm.p_value >= 1e-3 / 6


@pytest.fixture(scope="module")
def small_16_bit(small: Target) -> Target:
    return load_target(TargetSettings(path=str(small.folder), device="cpu", dtype="bfloat16"))


def test_a_16_bit_target_has_sampler_and_verifier_tested(
    small_16_bit: Target, poor_head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*rows: Sampled, samples: int | None = None) -> Certificate:
        settings = SETTINGS.model_copy(update={"samples": samples} | FEW)
        return certify(
            small_16_bit, poor_head, PROMPTS, frozenset(), settings,
            k=2, rows=rows, monitor=Monitor(),
        )  # fmt: skip

    assert run(*ROWS, samples=3000).passed
    certificate = run(OFF)
    assert (certificate.passed, certificate.level) == (True, "LS")
    (off,) = certificate.arms
    assert off.n >= off.n_for_99_power
    assert off.test.startswith("G-test of 3 tokens, sampler and verifier on the target's bfloat16")
    for name in ("residual is p", "one u a step"):
        monkeypatch.setattr(sampler_module, "verify", broken(*FAULTS[name]).verify)
        (arm,) = run(ON, samples=4000).arms
        assert (arm.passed, arm.level) == (False, "L3")


@pytest.mark.parametrize("row", [ON, BLOCK], ids=["token", "block"])
@on_devices
def test_the_false_alarm_rate_in_16_bits(small: Target, device: str, row: Sampled) -> None:
    """At a level of 5 % about 5 % of right samplers fail; ten times as many would be an error."""
    settings = TargetSettings(path=str(small.folder), device=device, dtype="bfloat16")
    target = load_target(settings)
    head = untrained_head(target, 2, VOCAB - 1).to(device).eval().requires_grad_(False)
    (tree,) = trees(target, head, [(3, 1, 2)], row.tree)
    assert {logits.dtype for logits in (tree.first_logits, *tree.logits)} == {torch.bfloat16}
    sampler, joint = TableSampler(tree), tree.joint()
    failed = 0
    for seed in range(60):
        sampling = Sampling(row.temperature, row.top_k, None, seed)
        answers = sampler.answers([Request(str(i), (3, 1, 2), 4, sampling) for i in range(1000)])
        counts = np.bincount([tree.cell(answer) for answer in answers], minlength=len(joint))
        failed += g_test(counts, joint).p_value < 0.05
    assert failed <= 9  # P(> 9) = 0.001


def test_no_prompts_are_refused(small: Target, poor_head: Eagle3Head) -> None:
    with pytest.raises(UserError, match="expected prompts to certify"):
        certify(small, poor_head, [], frozenset(), SETTINGS, k=2, rows=(), monitor=Monitor())


def test_trees_built_together_equal_trees_built_alone(small: Target, poor_head: Eagle3Head) -> None:
    contexts = [(0, 1, 2), (3, 3, 3), (4, 0, 1), (2, 2)]
    together = list(trees(small, poor_head, contexts, ON.tree))
    assert [tree.context for tree in together] == contexts
    for tree in together:
        (alone,) = trees(small, poor_head, [tree.context], ON.tree)
        np.testing.assert_allclose(tree.first, alone.first, rtol=1e-4)
        assert tree.margin == pytest.approx(alone.margin, abs=1e-4)
        np.testing.assert_allclose(tree.joint(), alone.joint(), rtol=1e-4, atol=1e-12)
        for fault in Fault:  # these depend on the draft's probabilities too
            pair = (emitted_distribution(one, fault) for one in (tree, alone))
            np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-12)
