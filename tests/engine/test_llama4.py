"""The dense Llama 4 drafter on a Llama 4 target decodes as it was trained, over chunk borders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftlab.engine.drafter import new_drafter
from draftlab.engine.eager_head import EagerHead
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Sampling
from draftlab.evaluate.certificate.exact_tree import ChainDrafts
from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target
from tests.helpers.chunked_chain import run_chain
from tests.helpers.decoding import trained_head, untrained_head
from tests.helpers.greedy_answers import answers, outcomes, requests, run
from tests.helpers.walk import assert_walk_matches_engine
from tests.helpers.zoo import zoo_target

CHUNK = 8  # of target and head; answers of 24 tokens cross several borders


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A multimodal target, of which the text model is used."""
    path = tmp_path_factory.mktemp("llama4")
    return zoo_target(path, "llama4", vocab_size=289, initializer_range=0.2)


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
    new = untrained_head(target, 3, target.vocab_size, llama4=llama4, **options)
    return trained_head(target, new, 60)


@pytest.mark.parametrize(("k", "batch"), [(3, 7), (5, 4)])
def test_the_walk_equals_the_engine(k: int, batch: int, target: Target, head: DraftHead) -> None:
    assert_walk_matches_engine(target, head, k, batch)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_agree(temperature: float, target: Target, head: DraftHead) -> None:
    """The drafts are longer than the rest of a chunk."""
    prompts = requests(8, seed=3, sampling=Sampling(temperature=temperature, seed=5))
    options = {"batch": 3, "max_length": target.max_length}
    drafter = new_drafter(head, 6)
    paged = run(Engine(target, drafter, cpu_prepacked=True, **options), prompts)
    assert isinstance(drafter.runner, EagerHead)  # fast paths support other layers
    reference = run(ReferenceEngine(target, new_drafter(head, 6), **options), prompts)
    assert outcomes(paged) == outcomes(reference)


def test_drafts_longer_than_a_chunk_change_no_token(target: Target, head: DraftHead) -> None:
    pairs = answers(target, 8, seed=4)
    engine = Engine(target, new_drafter(head, 11), batch=4, max_length=target.max_length)
    generations = run(engine, [request for request, _ in pairs])
    assert [g.token_ids for g in generations] == [g.token_ids for _, g in pairs]


@pytest.mark.parametrize("start", [4, 6, 7])
def test_the_certificates_chain_crosses_borders(
    start: int, target: Target, head: DraftHead
) -> None:
    """Its distributions equal those of a chain that is run token by token."""
    rows = torch.tensor([list(range(5, 16))])
    features = target.states(rows, head.config.boundaries).features
    chain = ChainDrafts(head, rows, features, 1.0)
    outputs = run_chain(head, SimpleNamespace(tokens=rows[0], last=features[0]), start)
    for depth, output in enumerate(outputs):
        expected = head.logits(output).double().softmax(-1)
        torch.testing.assert_close(chain.draft(start, depth)[0], expected, rtol=1e-4, atol=1e-7)
