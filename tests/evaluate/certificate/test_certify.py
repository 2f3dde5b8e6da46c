"""The certificate on a real target of a few tokens: right engines pass, broken ones do not.

What is broken is the verifier's own source, one piece at a time, inside the whole engine. That the
exact joints behind "samples for 99 % power" are right is `test_faults.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftlab.engine import drafter as drafter_module
from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sequence import Job
from draftlab.errors import UserError
from draftlab.evaluate.certificate import certify as certify_module
from draftlab.evaluate.certificate.certify import Certificate, CertifySettings, certify
from draftlab.evaluate.certificate.contexts import Sampled
from draftlab.evaluate.certificate.known_faults import Fault, emitted
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.sampling_types import VerifyResult
from draftlab.kernels.verify import verify
from draftlab.progress import Monitor
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.helpers.decoding import untrained_head
from tests.helpers.lossless import ARGMAX_DRAFT_FAULTS, FAULTS, broken
from tests.helpers.zoo import zoo_folder

VOCAB, SEED = 5, 2
# Hot enough for every cell to be seen; drafts a little cooler, as in the product.
SETTINGS = CertifySettings(
    temperature=1.0, context=3, contexts=60, finalists=12, enough=1000, equal_prompts=6,
    equal_tokens=16, batch=1024,
)  # fmt: skip
PROMPTS = [
    (f"p{i}", tuple(torch.randint(0, VOCAB, (5,), generator=torch.Generator().manual_seed(i))
                    .tolist()))
    for i in range(6)
]  # fmt: skip
SOURCE = {
    Fault.OFTEN: FAULTS["accepts 5 % too often"],
    Fault.TARGET: FAULTS["residual is p"],
    Fault.UNCLAMPED: FAULTS["residual is |p − q|"],
    Fault.ONE_U: FAULTS["one u a step"],
    Fault.BONUS: FAULTS["bonus from q"],
    # The head below drafts every token but 0: the noise of a token is the same in both draws.
    Fault.SHARED: ("Purpose.DRAFT, logits.shape[-1])", f"Purpose.EMIT, {VOCAB})[..., 1:]"),
}
# 99 % power in the context that is chosen here, rounded up.
SAMPLES = {
    Fault.OFTEN: 5000,
    Fault.TARGET: 1000,
    Fault.UNCLAMPED: 1000,
    Fault.SHARED: 14_000,
    Fault.ONE_U: 2500,
    Fault.BONUS: 1000,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = zoo_folder(
        tmp_path_factory.mktemp("small"), "llama", vocab_size=VOCAB, num_hidden_layers=3, seed=SEED
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def poor_head(small: Target) -> Eagle3Head:
    """Untrained, and without the target's token 0: a good head would hide faults."""
    return untrained_head(small, 2, VOCAB - 1).eval().requires_grad_(False)


Try = Callable[..., Certificate]


@pytest.fixture
def tried(small: Target, poor_head: Eagle3Head) -> Try:
    """The certificate of an engine with another verifier, under changed settings."""

    def run(verifier: Callable[..., VerifyResult] = verify, **changes: Any) -> Certificate:
        def engine(target: Target, drafter: ChainDrafter | None, **options: Any) -> Engine:
            return Engine(target, drafter, **options, verifier=verifier if drafter else verify)

        return certify(
            small, poor_head, PROMPTS, frozenset(), SETTINGS.model_copy(update=changes),
            k=2, monitor=Monitor(), engine=engine,
        )  # fmt: skip

    return run


def test_the_right_engine_is_certified(tried: Try) -> None:
    found = tried()
    assert (found.passed, found.level, found.faults) == (True, "L1", [])
    assert found.prompts_equal == 1.0
    assert [arm.draft_probs for arm in found.arms] == [True, False]
    for arm in found.arms:
        assert arm.n_for_99_power is not None
        assert arm.n >= max(arm.n_for_99_power, 2000)
        assert arm.freedom >= 16  # no narrow context
        assert arm.acceptance_p_value is not None
    sampled, argmax = found.arms
    assert set(sampled.needed) == {str(fault) for fault in Fault}
    assert set(argmax.needed) == {str(fault) for fault in Fault if fault is not Fault.SHARED}
    text = "\n".join(found.lines)
    for words in ("equal plain decoding's", "drafts sampled at T = 0.7", "samples for 99 % power",
                  "level L1", "0.001 of right engines fail"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_right_engine_passes_under_other_seeds_too(tried: Try, seed: int) -> None:
    found = tried(seed=seed, samples=1000)
    assert found.passed
    # …but so few samples prove little, and it says so
    assert found.level == "L2"
    assert any("L1 is not shown" in line for line in found.lines)


def test_the_reference_engine_is_certified(small: Target, poor_head: Eagle3Head) -> None:
    settings = SETTINGS.model_copy(update={"samples": 1000})
    found = certify(
        small, poor_head, PROMPTS, frozenset(), settings, k=2, monitor=Monitor(),
        engine=ReferenceEngine,
    )  # fmt: skip
    assert (found.passed, found.prompts_equal) == (True, 1.0)


@pytest.mark.parametrize("fault", list(Fault))
def test_a_broken_sampler_fails(tried: Try, monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """With as many samples as the certificate itself asks for against that fault."""
    module = broken(*SOURCE[fault])
    monkeypatch.setattr(certify_module, "ARMS", (True,))
    if fault is Fault.SHARED:
        monkeypatch.setattr(drafter_module, "sample_draft", module.sample_draft)
    found = tried(verify if fault is Fault.SHARED else module.verify, samples=SAMPLES[fault])
    assert found.arms[0].needed[str(fault)] <= SAMPLES[fault]
    assert not found.passed
    assert found.level == "L3"
    assert "draft probabilities on: the joint of 3 tokens is not the target's" in found.faults
    assert found.lines[-1].startswith("FAILED")


@pytest.mark.parametrize("fault", ARGMAX_DRAFT_FAULTS.values(), ids=ARGMAX_DRAFT_FAULTS.keys())
def test_a_broken_judge_of_argmax_drafts_fails(
    tried: Try, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, str]
) -> None:
    monkeypatch.setattr(certify_module, "ARMS", (False,))
    found = tried(broken(*fault).verify)
    assert "draft probabilities off: the joint of 3 tokens is not the target's" in found.faults


def test_a_wrong_verdict_at_temperature_zero_fails(tried: Try) -> None:
    def eager(*arguments: Any, **options: Any) -> VerifyResult:
        """Accepts one draft more than it should, at T = 0."""
        found = verify(*arguments, **options)
        more = (found.accepted + 1).clamp(max=arguments[1].shape[1])
        greedy = arguments[5].temperature == 0
        return VerifyResult(more.where(greedy, found.accepted), found.emitted, found.probability)

    found = tried(eager, samples=500)
    assert found.prompts_equal < 1
    assert found.faults == ["T = 0: tokens differ from plain decoding's in float32"]


MARK = 10.0  # of a step whose bonus was dropped


def without_bonus(
    logits: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor, *rest: Any, **options: Any
) -> VerifyResult:
    """A step that accepted all emits its drafts only: lossless, since the next step goes on."""
    found = verify(logits, drafts, num_drafts, *rest, **options)
    full = (found.accepted == num_drafts) & (num_drafts > 0)
    last = drafts.gather(1, (found.accepted - 1).clamp(min=0)[:, None])[:, 0]
    return VerifyResult(
        found.accepted - full.long(),
        last.where(full, found.emitted),
        found.probability + MARK * full[:, None],
    )


def test_a_dropped_bonus_is_lossless_and_caught_by_token_accounting(
    tried: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = Job.take

    def counting_all(self, tokens, accepted, num_drafts, chance, max_length):
        dropped = num_drafts > 0 and chance[0] >= MARK
        chance = [c - MARK * dropped for c in chance]
        take(self, tokens, accepted + dropped, num_drafts, chance, max_length)

    monkeypatch.setattr(Job, "take", counting_all)
    found = tried(without_bonus, samples=2000)
    assert all(arm.p_value > SETTINGS.level for arm in found.arms)
    assert found.prompts_equal == 1.0
    assert not found.passed
    assert found.faults
    assert all("token accounting" in fault for fault in found.faults)


def test_a_dropped_draft_is_caught_by_its_acceptance(
    tried: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, counted as it emits: the last draft seems never to be accepted."""
    take = Job.take

    def as_emitted(self, tokens, accepted, num_drafts, chance, max_length):
        chance = [c - MARK * (c >= MARK) for c in chance]
        take(self, tokens, accepted, num_drafts, chance, max_length)

    monkeypatch.setattr(Job, "take", as_emitted)
    found = tried(without_bonus, samples=2000)
    assert all(arm.p_value > SETTINGS.level for arm in found.arms)
    assert "draft probabilities on: drafts are not accepted as often as they should be" in (
        found.faults
    )


def test_without_prompts_there_is_nothing_to_certify_on(
    small: Target, poor_head: Eagle3Head
) -> None:
    with pytest.raises(UserError, match="expected prompts to certify"):
        certify(small, poor_head, [], frozenset(), SETTINGS, k=2, monitor=Monitor())


def test_trees_grown_together_are_those_grown_alone(small: Target, poor_head: Eagle3Head) -> None:
    contexts = [(0, 1, 2), (3, 3, 3), (4, 0, 1), (2, 2)]
    sampled = Sampled(levels=3, top_k=4, temperature=1.0, k=2, draft_temperature=0.7)
    together = list(sampled.grow(small, poor_head, contexts))
    assert [tree.context for tree in together] == contexts
    for found in together:
        (alone,) = sampled.grow(small, poor_head, [found.context])
        assert found.firsts == alone.firsts
        assert found.margin == pytest.approx(alone.margin, abs=1e-4)
        np.testing.assert_allclose(found.joint(), alone.joint(), rtol=1e-4, atol=1e-12)
        for fault in Fault:  # all that the draft's probabilities enter
            pair = (emitted(tree, fault, 2) for tree in (found, alone))
            np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-12)
