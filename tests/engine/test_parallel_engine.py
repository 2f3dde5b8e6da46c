"""Parallel heads: the paged engine has the reference engine's tokens and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import VerifiedFeatures
from draftlab.engine.engine import Engine
from draftlab.engine.parallel_drafter import ParallelDrafter
from draftlab.engine.prepacked_head import PrepackedHead
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling, sampling_metadata
from draftlab.engine.scheduler import Scheduler
from draftlab.evaluate.certificate.exact_tree import build_trees
from draftlab.heads.peagle import PeagleHead
from draftlab.kernels.cpu_prepacked_linear import why_no_prepacking
from draftlab.target_model.model import Target
from tests.helpers.greedy_answers import outcomes, requests, run

TRAINED = 3
TRAINED_ON: dict[str, Any] = {"seed": 100, "shortest": 3}  # prompts


def decode(
    engine: Any,
    target: Target,
    head: PeagleHead,
    prompts: list[Request],
    k: int,
    probs: bool,
    **options: Any,
) -> list[Any]:
    options = {"max_length": 128} | options
    drafter = ParallelDrafter(head, k, draft_probs=probs)
    return outcomes(run(engine(target, drafter, **options), prompts))


SIZES: list[dict[str, Any]] = [
    *({"batch": batch} for batch in range(1, 8)),
    {"batch": 5, "block_size": 8},
    {"batch": 5, "block_size": 8, "num_blocks": 17},  # some are preempted
    {"batch": 3, "block_size": 16, "prefill_tokens": 24},  # prompts in chunks
]


@pytest.mark.parametrize(
    ("temperature", "probs"), [(0.0, False), (0.0, True), (0.8, False), (0.8, True)]
)
@pytest.mark.parametrize("k", [1, TRAINED, TRAINED + 2])
def test_tokens_and_steps_equal_the_reference_engine(
    k: int, temperature: float, probs: bool, target: Target, parallel_head: PeagleHead
) -> None:
    # Without top_k a toy hardly ever accepts argmax drafts at T > 0.
    top_k = 4 if temperature and not probs else None
    prompts = requests(8, sampling=Sampling(temperature, top_k=top_k, seed=3), **TRAINED_ON)
    expected = decode(ReferenceEngine, target, parallel_head, prompts, k, probs, batch=4)
    counts = {accepted for *_, steps in expected for drafted, accepted in steps if drafted == k}
    assert counts >= {0, 1}  # or the test proves little
    assert k == 1 or max(counts) > 1
    for sizes in SIZES:
        result = decode(Engine, target, parallel_head, prompts, k, probs, **sizes)
        assert result == expected, sizes


def test_greedy_tokens_equal_plain_decoding(target: Target, parallel_head: PeagleHead) -> None:
    prompts = requests(8, **TRAINED_ON)
    plain = run(Engine(target, batch=4, max_length=128), prompts)
    drafted = decode(Engine, target, parallel_head, prompts, TRAINED, False, batch=4)
    assert [tokens for _, tokens, *_ in drafted] == [g.token_ids for g in plain]


@pytest.mark.parametrize("limit", [21, 24])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_near_the_limit(
    temperature: float, limit: int, target: Target, parallel_head: PeagleHead
) -> None:
    """Steps draft fewer tokens, and masked slots beyond the limit have no effect."""
    sampling = Sampling(temperature, seed=3)
    prompts = requests(8, sampling=sampling, stop_ids=frozenset(), max_new_tokens=30, seed=9)
    common = target, parallel_head, prompts, TRAINED, True
    unlimited = decode(Engine, *common, batch=4)
    expected = decode(ReferenceEngine, *common, batch=3, max_length=limit)
    options: list[dict[str, Any]] = [
        {"batch": 4},
        {"batch": 4, "block_size": 5},
        {"batch": 1, "block_size": 16},
    ]
    for sizes in options:
        assert decode(Engine, *common, max_length=limit, **sizes) == expected, sizes
    assert {drafted for *_, steps in expected for drafted, _ in steps} >= {0, 1, 2, 3}
    for request, (_, tokens, *_), (_, longer, *_) in zip(prompts, expected, unlimited, strict=True):
        room = limit - len(request.prompt_ids)
        if temperature == 0:
            assert tokens == longer[:room]
        assert len(tokens) == room


def test_small_pools_preempt(
    target: Target, parallel_head: PeagleHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of `SIZES` proves that preempted sequences decode the same."""
    preempted = []
    preempt = Scheduler.preempt
    monkeypatch.setattr(
        Scheduler, "preempt", lambda scheduler: preempted.append(1) or preempt(scheduler)
    )
    decode(Engine, target, parallel_head, requests(8, **TRAINED_ON), TRAINED, False, **SIZES[-2])
    assert preempted


@pytest.mark.skipif(
    why_no_prepacking(torch.device("cpu"), torch.float32) is not None, reason="no packed products"
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_prepacked_products_decode_the_same(
    temperature: float, target: Target, parallel_head: PeagleHead
) -> None:
    prompts = requests(8, sampling=Sampling(temperature, seed=3), **TRAINED_ON)
    results = []
    for prepacked in (False, True):
        drafter = ParallelDrafter(parallel_head, TRAINED)
        engine = Engine(target, drafter, batch=3, max_length=128, cpu_prepacked=prepacked)
        assert isinstance(drafter.runner, PrepackedHead) == prepacked
        results.append(outcomes(run(engine, prompts)))
    assert results[0] == results[1]


def test_the_certificates_tree_has_the_drafters_probabilities(
    target: Target, parallel_head: PeagleHead
) -> None:
    """The tree computes them without engine and drafter."""
    context, ids = (5, 6, 7, 8), torch.tensor([[5, 6, 7, 8]])
    (tree,) = build_trees(
        target, parallel_head, [context], levels=3, top_k=2, temperature=1.0, k=3,
        draft_temperature=0.7,
    )  # fmt: skip
    drafter = ParallelDrafter(parallel_head, 3, draft_temperature=0.7)
    drafter.start(2, 16)
    verified = VerifiedFeatures(
        torch.tensor([[6, 7, 8, tree.first_tokens[0]]]),
        target.states(ids, parallel_head.config.boundaries).features,
        torch.arange(4)[None],
        torch.tensor([4]),
        torch.tensor([[1]], dtype=torch.int32),
        sampling_metadata([Request("r", context, 4, Sampling(1.0))], ids.device),
    )
    distribution = drafter.propose(verified).distribution
    assert distribution is not None
    q = torch.zeros(3, target.vocab_size)
    q[:, drafter.draft_ids] = distribution.probabilities()[0]
    for depth in range(3):  # of the step that begins at the root
        expected = torch.from_numpy(tree.draft[depth][depth])
        actual = q[depth][torch.from_numpy(tree.tokens[depth])]
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-7)
        assert bool((expected > 1e-4).any())
