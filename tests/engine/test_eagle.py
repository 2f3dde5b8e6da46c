"""EAGLE heads, and EAGLE3 heads with norms: all engines agree, and so does the walk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.prepacked_head import PrepackedHead
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Sampling
from draftlab.kernels.cpu_prepacked_linear import why_no_prepacking
from draftlab.target_model.model import Target
from draftlab.train.objectives.loss import SOFT_CE, LossTerms
from tests.helpers.decoding import EAGLE, NORMED, trained_head, untrained_head
from tests.helpers.greedy_answers import outcomes, requests, run
from tests.helpers.walk import assert_walk_matches_engine

KINDS = {"eagle of 2 layers": EAGLE | {"num_layers": 2}, "normed": NORMED}


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, target: Target) -> Any:
    """A head trained on the target's greedy answers until some of its drafts are accepted."""
    changes = KINDS[request.param]
    new = untrained_head(target, 3, target.vocab_size - 20, **changes)
    terms = LossTerms("soft_ce", 0.1, 1.0) if changes.get("family") == "eagle" else SOFT_CE
    return trained_head(target, new, 40, terms)


def test_the_walk_counts_what_the_engine_counts(target: Target, head: Any) -> None:
    assert_walk_matches_engine(target, head, 3, 7)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_agree(
    temperature: float, target: Target, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = requests(8, seed=100, sampling=Sampling(temperature, seed=3))
    drafter = new_drafter(head, 3)
    assert type(drafter) is ChainDrafter
    expected = outcomes(run(Engine(target, drafter, batch=5, max_length=128), prompts))
    reference = ReferenceEngine(target, new_drafter(head, 3), batch=3, max_length=128)
    assert outcomes(run(reference, prompts)) == expected
    if why_no_prepacking(torch.device("cpu"), torch.float32) is None:
        packed = Engine(
            target,
            drafter,
            batch=5,
            block_size=8,
            num_blocks=17,
            max_length=128,
            cpu_prepacked=True,
        )
        assert isinstance(drafter.runner, PrepackedHead)
        assert outcomes(run(packed, prompts)) == expected
    # The passes of a GPU, on their kernels' references (tests/engine/test_on_gpu.py: on a GPU).
    monkeypatch.setattr(FusedHead, "supports", staticmethod(lambda _head: True))
    fused = Engine(target, drafter, batch=5, max_length=128)
    assert isinstance(drafter.runner, FusedHead)
    assert outcomes(run(fused, prompts)) == expected
