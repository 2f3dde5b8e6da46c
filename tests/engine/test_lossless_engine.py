"""The engine's joint distribution of answers is the target's: tiny target, head, ragged batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.parallel_drafter import ParallelDrafter
from draftlab.engine.step import Step
from draftlab.target_model.model import Target
from tests.helpers.decoding import PARALLEL, untrained_head
from tests.helpers.engines import JOINT_VOCAB, joint_p_value
from tests.helpers.zoo import zoo_target


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("tiny")
    return zoo_target(path, "llama", vocab_size=JOINT_VOCAB, num_hidden_layers=3, seed=4)


def poor_drafter(target: Target, kind: str, *, draft_probs: bool = True) -> Any:
    """Return a drafter with an untrained head, without token 0: a good head would hide faults."""
    if kind == "chain":
        head = untrained_head(target, 2, JOINT_VOCAB - 1).eval().requires_grad_(False)
        return ChainDrafter(head, 2, draft_probs=draft_probs)
    family = PARALLEL | {"mask_token_id": JOINT_VOCAB - 1}
    head = untrained_head(target, 2, JOINT_VOCAB - 1, **family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (head.mask_hidden, head.mask_embedding, head.fc.weight):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return ParallelDrafter(head.eval().requires_grad_(False), 2, draft_probs=draft_probs)


def test_plain_sampling_is_exact(tiny_target: Target) -> None:
    assert joint_p_value(tiny_target, None) > 1e-3


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("kind", ["chain", "parallel"])
def test_speculative_sampling_is_exact(kind: str, draft_probs: bool, tiny_target: Target) -> None:
    drafter = poor_drafter(tiny_target, kind, draft_probs=draft_probs)
    assert joint_p_value(tiny_target, drafter) > 1e-3


def test_another_rows_draft_probabilities_are_noticed(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Step._draft_distribution

    def shuffled(self, layout):
        q = right(self, layout)
        return q if q is None else q[torch.arange(len(layout.index)).roll(1)]

    monkeypatch.setattr(Step, "_draft_distribution", shuffled)
    assert joint_p_value(tiny_target, poor_drafter(tiny_target, "chain")) < 1e-6


def test_another_depths_draft_probabilities_are_noticed(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ParallelDrafter._proposal

    def shifted(self: Any, tokens: Any, logits: Any, log_sum: Any, sampling: Any) -> Any:
        return right(self, tokens, logits.roll(1, 0), log_sum.roll(1, 0), sampling)

    monkeypatch.setattr(ParallelDrafter, "_proposal", shifted)
    assert joint_p_value(tiny_target, poor_drafter(tiny_target, "parallel")) < 1e-6
