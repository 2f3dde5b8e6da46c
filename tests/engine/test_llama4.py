"""The dense Llama 4 drafter on a Llama 4 target decodes as it was trained, over chunk borders."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftlab.engine.drafter import new_drafter
from draftlab.engine.eager_head import PlainHead
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Sampling
from draftlab.evaluate.certificate.exact_tree import _Chain
from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target, TargetSettings, load_target
from tests.evaluate.test_walk import assert_walked_as_decoded
from tests.helpers.decoding import trained_head, untrained_head
from tests.helpers.greedy_answers import answers, requests, run
from tests.helpers.zoo import zoo_folder
from tests.train.objectives.test_chunked_attention import server

CHUNK = 8  # of both, so that answers of 24 tokens cross a few borders


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """With images, so that the text tower has to be found."""
    folder: Path = zoo_folder(
        tmp_path_factory.mktemp("llama4"), "llama4", vocab_size=289, initializer_range=0.2
    )
    return load_target(TargetSettings(path=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    llama4 = {
        "no_rope_layers": (1, 0),
        "attention_chunk_size": CHUNK,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 16,
        "attn_scale": 0.5,
    }
    options = {"family": "eagle_llama4", "boundaries": (target.num_layers,), "num_layers": 2}
    made = untrained_head(target, 3, target.vocab_size, llama4=llama4, **options)
    return trained_head(target, made, 60)


@pytest.mark.parametrize(("k", "batch"), [(3, 7), (5, 4)])
def test_every_step_of_the_walk_is_the_engines(
    k: int, batch: int, target: Target, head: DraftHead
) -> None:
    assert_walked_as_decoded(target, head, k, batch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_agree(temperature: float, target: Target, head: DraftHead) -> None:
    """The paged engine and the eager one, drafts longer than what is left of a chunk."""
    asked = requests(8, seed=3, sampling=Sampling(temperature=temperature, seed=5))
    options = {"batch": 3, "max_length": target.max_length}
    drafter = new_drafter(head, 6)
    found = run(Engine(target, drafter, packed=True, **options), asked)
    assert isinstance(drafter.passes, PlainHead)  # the fast ones are for other layers
    expected = run(ReferenceEngine(target, new_drafter(head, 6), **options), asked)
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [g.counters for g in found] == [g.counters for g in expected]


def test_drafts_longer_than_a_chunk_change_no_token(target: Target, head: DraftHead) -> None:
    pairs = answers(target, 8, seed=4)
    engine = Engine(target, new_drafter(head, 11), batch=4, max_length=target.max_length)
    found = run(engine, [request for request, _ in pairs])
    assert [g.token_ids for g in found] == [g.token_ids for _, g in pairs]


@pytest.mark.parametrize("start", [4, 6, 7])
def test_the_certificates_chain_crosses_borders_too(
    start: int, target: Target, head: DraftHead
) -> None:
    """Its distributions, made without engine and drafter, are those of a cache kept by hand."""
    rows = torch.tensor([list(range(5, 16))])
    features = target.states(rows, head.config.boundaries).features
    chain = _Chain(head, rows, features, 1.0)
    by_hand = server(head, SimpleNamespace(tokens=rows[0], last=features[0]), start)
    for depth, output in enumerate(by_hand):
        expected = head.logits(output).double().softmax(-1)
        torch.testing.assert_close(chain.draft(start, depth)[0], expected, rtol=1e-4, atol=1e-7)
