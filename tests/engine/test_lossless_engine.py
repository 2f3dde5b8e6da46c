"""The engine's joint distribution of answers is the target's: tiny target, head, ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from draftlab.engine.drafter import ChainDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.kernels.sampling import sample_draft
from draftlab.target_model.model import Target
from tests.helpers.decoding import DFLASH2, DSPARK, PARALLEL, untrained_head
from tests.helpers.engines import JOINT_VOCAB, joint_p_value
from tests.helpers.lossless import FAULTS, broken
from tests.helpers.zoo import zoo_target


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("tiny")
    return zoo_target(path, "llama", vocab_size=JOINT_VOCAB, num_hidden_layers=3, seed=4)


@pytest.fixture(scope="module")
def hybrid_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return zoo_target(
        tmp_path_factory.mktemp("hybrid"), "qwen3_next", vocab_size=JOINT_VOCAB, seed=4
    )


def poor_drafter(target: Target, kind: str, **options: Any) -> Any:
    """Return a drafter with an untrained head, without token 0: a good head would hide faults."""
    if kind == "chain":
        head = untrained_head(target, 2, JOINT_VOCAB - 1).eval().requires_grad_(False)
        return ChainDrafter(head, 2, **options)
    fields = {"parallel": PARALLEL, "dspark": DSPARK, "dflash2": DFLASH2 | {"selector_top_k": 2}}
    family = fields[kind] | {"mask_token_id": JOINT_VOCAB - 1}
    head = untrained_head(target, 2, JOINT_VOCAB - 1, **family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if name.startswith(("mask_", "fc.", "markov_head", "candidate_")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return new_drafter(head.eval().requires_grad_(False), 2, **options)


def test_plain_sampling_is_exact(tiny_target: Target) -> None:
    assert joint_p_value(tiny_target, None) > 1e-3


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("kind", ["chain", "parallel", "dspark", "dflash2"])
def test_speculative_sampling_is_exact(kind: str, draft_probs: bool, tiny_target: Target) -> None:
    drafter = poor_drafter(tiny_target, kind, draft_probs=draft_probs)
    assert joint_p_value(tiny_target, drafter) > 1e-3


@pytest.mark.parametrize("kind", ["chain", "parallel", "dspark", "dflash2"])
def test_block_verification_is_exact(kind: str, tiny_target: Target) -> None:
    drafter = poor_drafter(tiny_target, kind, verification="block")
    assert joint_p_value(tiny_target, drafter) > 1e-3
    # Finer faults need the samples of tests/kernels/test_lossless.py.
    fault = broken(*FAULTS["residual is p"])
    assert joint_p_value(tiny_target, drafter, fault.verify, rows=1500) < 1e-6


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("kind", ["chain", "parallel", "dspark"])
def test_block_verification_never_draws_from_the_same_noise_again(
    kind: str,
    verification: str,
    tiny_target: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Token verification does: it has not looked at the drafts behind a rejected one."""
    positions: list[int] = []

    def recorded(logits: Tensor, at: Tensor, *rest: Any, **options: Any) -> Any:
        positions.extend((at + options.get("offset", 0)).tolist())
        return sample_draft(logits, at, *rest, **options)

    monkeypatch.setattr("draftlab.engine.draft_sampler.sample_draft", recorded)
    drafter = poor_drafter(tiny_target, kind, verification=verification)
    engine = Engine(tiny_target, drafter, batch=1, max_length=64)
    (generation,) = engine.generate([Request("a", (3,), 40, Sampling(1.3, seed=1))])
    assert any(accepted < drafted for drafted, accepted in generation.steps)
    assert (len(set(positions)) == len(positions)) == (verification == "block")


@pytest.mark.parametrize("kind", ["chain", "parallel", "dspark"])
def test_sampling_with_recurrent_layers_is_exact(kind: str, hybrid_target: Target) -> None:
    assert joint_p_value(hybrid_target, poor_drafter(hybrid_target, kind)) > 1e-3
