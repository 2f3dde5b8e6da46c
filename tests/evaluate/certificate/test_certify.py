"""The certificate on a target with a tiny vocabulary: correct engines pass, broken ones fail.

The broken engines are the whole engine with one piece of the verifier's source replaced.
`test_known_faults.py` tests the exact distributions behind "samples for 99 % power".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftlab.engine.block_drafter import BlockDrafter
from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.generation_state import Sequence as EngineSequence
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.evaluate.certificate import certify as certify_module
from draftlab.evaluate.certificate import sampler as sampler_module
from draftlab.evaluate.certificate.certify import Certificate, CertifySettings, Sampled, certify
from draftlab.evaluate.certificate.contexts import trees
from draftlab.evaluate.certificate.gtest import g_test
from draftlab.evaluate.certificate.known_faults import Fault, emitted_distribution, known_faults
from draftlab.evaluate.certificate.sampler import TableSampler
from draftlab.heads.block import BlockHead
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.sampling_types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.broken_verifiers import faulty_verifier
from tests.helpers.decoding import DSPARK, untrained_head
from tests.helpers.gpu import on_devices
from tests.helpers.lossless import ARGMAX_DRAFT_FAULTS, FAULTS, broken
from tests.helpers.zoo import zoo_folder

VOCAB, SEED = 5, 2
SETTINGS = CertifySettings(
    context=3, contexts=60, finalists=12, enough=1000, equal_prompts=6, equal_tokens=16, batch=1024,
)  # fmt: skip
# Every cell occurs at this temperature; drafts are cooler.
ON = Sampled(1.0, 2, True, draft_temperature=0.7, top_k=4)
OFF = Sampled(1.0, 2, False, top_k=4)
BLOCK = replace(ON, verification="block")
PROMPTS = [
    (f"p{i}", tuple(torch.randint(0, VOCAB, (5,), generator=torch.Generator().manual_seed(i))
                    .tolist()))
    for i in range(6)
]  # fmt: skip
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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = zoo_folder(
        tmp_path_factory.mktemp("small"), "llama", vocab_size=VOCAB, num_hidden_layers=3, seed=SEED
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def poor_head(small: Target) -> Eagle3Head:
    """An untrained head without the target's token 0; a good head would hide faults."""
    return untrained_head(small, 2, VOCAB - 1).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=[VOCAB, VOCAB - 1], ids=["whole", "reduced"])
def markov_head(small: Target, request: pytest.FixtureRequest) -> BlockHead:
    """A random DSpark head of two drafts, with a strong bias; it may lack the target's token 0."""
    head = untrained_head(small, 2, request.param, **DSPARK | {"mask_token_id": VOCAB - 1})
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.startswith(("fc.", "markov_head")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


RunCertify = Callable[..., Certificate]


@pytest.fixture
def run_certify(small: Target, poor_head: Eagle3Head) -> RunCertify:
    """A function that certifies an engine with another verifier and changed settings."""

    def run(
        verifier: Callable[..., VerifyResult] = verify,
        rows: Sequence[Sampled] = (ON, OFF),
        adaptive: bool = False,
        **changes: Any,
    ) -> Certificate:
        def engine(target: Target, drafter: ChainDrafter | None, **options: Any) -> Engine:
            return Engine(target, drafter, **options, verifier=verifier if drafter else verify)

        return certify(
            small, poor_head, PROMPTS, frozenset(), SETTINGS.model_copy(update=changes),
            k=2, rows=rows, adaptive=adaptive, monitor=Monitor(), engine=engine,
        )  # fmt: skip

    return run


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


def test_adaptive_decoding_is_certified_at_every_temperature(run_certify: RunCertify) -> None:
    certificate = run_certify(rows=(replace(ON, adaptive=True),), adaptive=True, samples=1000)
    assert (certificate.passed, certificate.prompts_equal) == (True, 1.0), certificate.faults
    plain, adaptive, sampled = certificate.lines[:3]
    assert plain.startswith("T = 0, K = 2, float32: tokens of 100.0%")
    assert adaptive.startswith("T = 0, adaptive K ≤ 2, float32: tokens of 100.0%")
    assert "T = 1, top-k 4, adaptive K ≤ 2, draft probabilities on" in sampled


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


def test_the_name_of_an_adaptive_row_is_its_own() -> None:
    """Its answers' noise, and the lines of the certificate, are named by it."""
    adaptive = replace(ON, adaptive=True)
    assert adaptive.name != ON.name
    assert f"K ≤ {ON.k}" in adaptive.name


def test_an_adaptive_row_is_tested_without_a_claim_of_power(run_certify: RunCertify) -> None:
    """With 5,000 samples the fixed row notices tests that pass 5 % too often; this one does not."""
    certificate = run_certify(rows=[replace(ON, adaptive=True)])
    (test,) = certificate.arms
    assert test.n >= test.n_for_99_power
    assert (certificate.passed, test.level, certificate.level) == (True, "L2", "L2")
    assert any("L1 and LS are not shown" in line for line in certificate.lines)


def test_block_verification_is_certified(run_certify: RunCertify) -> None:
    certificate = run_certify(rows=[BLOCK])
    assert (certificate.passed, certificate.level, certificate.faults) == (True, "L1", [])
    (block,) = certificate.arms
    assert block.row == BLOCK
    assert "block verification" in block.test
    assert set(block.needed) == set(map(str, Fault)) - {str(Fault.ONE_U)}
    one_draft = known_faults(replace(BLOCK, k=1).tree)
    assert set(map(str, one_draft)) == set(block.needed) - {str(Fault.PREFIX)}


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


MARKOV_ROWS = [
    *(Sampled(temperature, 2, True) for temperature in (0.8, 1.5)),
    *(Sampled(temperature, 2, False, top_k=4) for temperature in (0.8, 1.5)),
    Sampled(0.8, 1, True),  # a block of one slot
]


def certify_markov(small: Target, head: BlockHead, **changes: Any) -> Certificate:
    settings = SETTINGS.model_copy(update=FEW | changes)
    return certify(
        small, head, PROMPTS, frozenset(), settings, k=2, rows=MARKOV_ROWS, monitor=Monitor(),
        engine=Engine,
    )  # fmt: skip


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


FEW = {"contexts": 12, "finalists": 2}
ROWS = [
    Sampled(0.7, 4, True),  # the whole vocabulary
    Sampled(1.3, 3, False, top_p=0.8),
    Sampled(1.0, 1, True, draft_temperature=0.7, top_k=3, top_p=0.95),
]


def test_every_row_is_tested_with_its_own_sampling(run_certify: RunCertify) -> None:
    certificate = run_certify(rows=ROWS, samples=2000, num_rows=3, **FEW)
    assert certificate.passed
    for row, arm in zip(ROWS, certificate.arms, strict=True):
        assert vars(row).items() <= arm.model_dump().items()
        assert arm.test == f"G-test of {row.k + 1} tokens, engine, {row.name}"
        assert arm.p_value >= 1e-3 / 6


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
