"""Parallel heads in the engine: the reference engine's tokens and steps, and no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import Observed
from draftlab.engine.engine import Engine
from draftlab.engine.parallel_drafter import ParallelDrafter
from draftlab.engine.prepacked_head import PackedHead
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Generation, Request, Sampling, row_keys
from draftlab.evaluate.certificate.exact_tree import grow
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.packed_linear import why_not_packed
from draftlab.target_model.model import Target
from tests.engine import test_lossless_engine as lossless
from tests.engine.test_lossless_engine import small  # noqa: F401  (a fixture)
from tests.helpers.decoding import PARALLEL, untrained_head
from tests.helpers.greedy_answers import requests, run

TRAINED = 3
ASKED: dict[str, Any] = {"seed": 100, "shortest": 3}  # prompts that the head was trained on


def told(found: list[Generation]) -> list[Any]:
    return [(g.id, g.token_ids, g.finish, g.steps) for g in found]


def decoded(
    engine: Any,
    target: Target,
    head: PeagleHead,
    asked: list[Request],
    k: int,
    probs: bool,
    **how: Any,
) -> list[Any]:
    how = {"max_length": 128} | how
    return told(run(engine(target, ParallelDrafter(head, k, draft_probs=probs), **how), asked))


SIZES: list[dict[str, Any]] = [
    *({"batch": batch} for batch in range(1, 8)),
    {"batch": 5, "block_size": 8},
    {"batch": 5, "block_size": 8, "num_blocks": 17},  # some are evicted
    {"batch": 3, "block_size": 16, "prefill_tokens": 24},  # prompts in chunks
]


@pytest.mark.parametrize(
    ("temperature", "probs"), [(0.0, False), (0.0, True), (0.8, False), (0.8, True)]
)
@pytest.mark.parametrize("k", [1, TRAINED, TRAINED + 2])
def test_tokens_and_steps_are_the_reference_engines(
    k: int, temperature: float, probs: bool, target: Target, parallel_head: PeagleHead
) -> None:
    # Without it, argmax drafts are hardly ever accepted by a toy at T > 0.
    top_k = 4 if temperature and not probs else None
    asked = requests(8, sampling=Sampling(temperature, top_k=top_k, seed=3), **ASKED)
    expected = decoded(ReferenceEngine, target, parallel_head, asked, k, probs, batch=4)
    fates = {accepted for *_, steps in expected for drafted, accepted in steps if drafted == k}
    assert fates >= {0, 1}  # drafts of several fates, or the test says little
    assert k == 1 or max(fates) > 1
    for sizes in SIZES:
        found = decoded(Engine, target, parallel_head, asked, k, probs, **sizes)
        assert found == expected, sizes


def test_greedy_tokens_are_plain_decodings(target: Target, parallel_head: PeagleHead) -> None:
    asked = requests(8, **ASKED)
    plain = run(Engine(target, batch=4, max_length=128), asked)
    found = decoded(Engine, target, parallel_head, asked, TRAINED, False, batch=4)
    assert [tokens for _, tokens, *_ in found] == [g.token_ids for g in plain]


@pytest.mark.parametrize("limit", [21, 24])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_near_the_limit(
    temperature: float, limit: int, target: Target, parallel_head: PeagleHead
) -> None:
    """Steps draft fewer there, and masks beyond it change nothing."""
    sampling = Sampling(temperature, seed=3)
    asked = requests(8, sampling=sampling, stop_ids=frozenset(), max_new_tokens=30, seed=9)
    roomy = decoded(Engine, target, parallel_head, asked, TRAINED, True, batch=4)
    how: dict[str, Any] = {"max_length": limit}
    expected = decoded(ReferenceEngine, target, parallel_head, asked, TRAINED, True, batch=3, **how)
    for sizes in ({"batch": 4}, {"batch": 4, "block_size": 5}, {"batch": 1, "block_size": 16}):
        found = decoded(Engine, target, parallel_head, asked, TRAINED, True, **how, **sizes)
        assert found == expected, sizes
    assert {drafted for *_, steps in expected for drafted, _ in steps} >= {0, 1, 2, 3}
    for request, (_, tokens, *_), (_, more, *_) in zip(asked, expected, roomy, strict=True):
        room = limit - len(request.prompt_ids)
        if temperature == 0:
            assert tokens == more[:room]
        assert len(tokens) == room


def test_small_pools_evict(
    target: Target, parallel_head: PeagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sizes above are there for."""
    evictions = []
    evict = Engine._evict
    monkeypatch.setattr(
        Engine, "_evict", lambda self, *args: evictions.append(1) or evict(self, *args)
    )
    asked = requests(8, **ASKED)
    decoded(Engine, target, parallel_head, asked, TRAINED, False, **SIZES[-2])
    assert evictions


@pytest.mark.skipif(
    why_not_packed(torch.device("cpu"), torch.float32) is not None, reason="no packed products"
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_packed_products_decode_the_same(
    temperature: float, target: Target, parallel_head: PeagleHead
) -> None:
    asked = requests(8, sampling=Sampling(temperature, seed=3), **ASKED)
    found = []
    for packed in (False, True):
        drafter = ParallelDrafter(parallel_head, TRAINED)
        engine = Engine(target, drafter, batch=3, max_length=128, packed=packed)
        assert isinstance(drafter.passes, PackedHead) == packed
        found.append(told(run(engine, asked)))
    assert found[0] == found[1]


@pytest.mark.parametrize("draft_probs", [True, False])
def test_the_targets_distribution(
    draft_probs: bool,
    small: Target,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for chains: the joint of four tokens against the exact one."""
    monkeypatch.setattr(lossless, "ChainDrafter", ParallelDrafter)
    assert lossless.p_value(small, poor_head(small), draft_probs=draft_probs) > 1e-3


def test_probabilities_of_the_depth_before_are_noticed(
    small: Target,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the test above would say little of depths."""
    true = ParallelDrafter._proposal

    def shifted(self: Any, tokens: Any, logits: Any, log_sum: Any, sampling: Any) -> Any:
        return true(self, tokens, logits.roll(1, 0), log_sum.roll(1, 0), sampling)

    monkeypatch.setattr(lossless, "ChainDrafter", ParallelDrafter)
    monkeypatch.setattr(ParallelDrafter, "_proposal", shifted)
    assert lossless.p_value(small, poor_head(small)) < 1e-6


def poor_head(target: Target) -> PeagleHead:
    """Untrained and loud, and without the target's token 0: a good head would hide faults."""
    family = PARALLEL | {"mask_token_id": target.vocab_size - 1}
    head: Any = untrained_head(target, 2, target.vocab_size - 1, **family)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (head.mask_hidden, head.mask_embedding, head.fc.weight):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head.eval().requires_grad_(False)


def test_the_certificates_tree_knows_what_is_drafted(
    target: Target, parallel_head: PeagleHead
) -> None:
    """Its draft probabilities, made without engine and drafter, are the drafter's own."""
    context, ids = (5, 6, 7, 8), torch.tensor([[5, 6, 7, 8]])
    (tree,) = grow(
        target, parallel_head, [context], levels=3, top_k=2, temperature=1.0, k=3,
        draft_temperature=0.7,
    )  # fmt: skip
    drafter = ParallelDrafter(parallel_head, 3, draft_temperature=0.7)
    drafter.start(2, 16)
    observed = Observed(
        torch.tensor([[6, 7, 8, tree.firsts[0]]]),
        target.states(ids, parallel_head.config.boundaries).features,
        torch.arange(4)[None],
        torch.tensor([4]),
        torch.tensor([[1]], dtype=torch.int32),
        row_keys([Request("r", context, 4, Sampling(1.0))], ids.device),
    )
    distribution = drafter.propose(observed).distribution
    assert distribution is not None
    q = torch.zeros(3, target.vocab_size)
    q[:, drafter.draft_ids] = distribution.probabilities()[0]
    for depth in range(3):  # of the step that begins at the root
        expected = torch.from_numpy(tree.draft[depth][depth])
        found = q[depth][torch.from_numpy(tree.tokens[depth])]
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-7)
        assert bool((expected > 1e-4).any())
