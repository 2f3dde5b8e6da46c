"""EAGLE heads, and EAGLE3 heads with norms, in every engine; the walk counts what they count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter, new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.fused_head import FusedHead
from draftlab.engine.prepacked_head import PackedHead
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Sampling
from draftlab.kernels.packed_linear import why_not_packed
from draftlab.target_model.model import Target
from draftlab.train.objectives.loss import SOFT_CE, Terms
from tests.engine.test_prepacked_engine import told
from tests.evaluate.test_walk import assert_walked_as_decoded
from tests.helpers.decoding import EAGLE, NORMED, trained_head, untrained_head
from tests.helpers.greedy_answers import requests, run

KINDS = {"eagle of 2 layers": EAGLE | {"num_layers": 2}, "normed": NORMED}


@pytest.fixture(scope="module", params=KINDS)
def head(request: pytest.FixtureRequest, target: Target) -> Any:
    """Trained on the target's greedy answers until it is right often, wrong often."""
    made = untrained_head(target, 3, target.vocab_size - 20, **KINDS[request.param])
    imitates = "eagle" in request.param
    terms = Terms("soft_ce", 0.1, 1.0) if imitates else SOFT_CE
    return trained_head(target, made, 40, terms)


def test_the_walk_counts_what_the_engine_counts(target: Target, head: Any) -> None:
    assert_walked_as_decoded(target, head, 3, 7)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_agree(
    temperature: float, target: Target, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = requests(8, seed=100, sampling=Sampling(temperature, seed=3))
    drafter = new_drafter(head, 3)
    assert type(drafter) is ChainDrafter
    plain = Engine(target, drafter, batch=5, max_length=128)
    expected = told(run(plain, asked))
    reference = ReferenceEngine(target, new_drafter(head, 3), batch=3, max_length=128)
    assert told(run(reference, asked)) == expected
    if why_not_packed(torch.device("cpu"), torch.float32) is None:
        packed = Engine(
            target, drafter, batch=5, block_size=8, num_blocks=17, max_length=128, packed=True
        )
        assert isinstance(drafter.passes, PackedHead)
        assert told(run(packed, asked)) == expected
    # A GPU's passes, on the references of their kernels; `tests/engine/test_on_gpu.py` has them on one.
    monkeypatch.setattr(FusedHead, "suits", staticmethod(lambda _head: True))
    fused = Engine(target, drafter, batch=5, max_length=128)
    assert isinstance(drafter.passes, FusedHead)
    assert told(run(fused, asked)) == expected
