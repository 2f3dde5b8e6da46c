"""The engine on packed products: the plain engine's tokens and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.eager_head import PlainHead
from draftlab.engine.engine import Engine
from draftlab.engine.prepacked_head import PackedHead
from draftlab.engine.sampling import Generation, Sampling
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.packed_linear import why_not_packed
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import PackedDecoder
from tests.evaluate.test_evaluator import Heard, evaluate
from tests.helpers.greedy_answers import requests, run

pytestmark = pytest.mark.skipif(
    why_not_packed(torch.device("cpu"), torch.float32) is not None, reason="no packed products"
)


def told(found: list[Generation]) -> list[Any]:
    return [(g.token_ids, g.steps, g.finish) for g in found]


SIZES: list[dict[str, Any]] = [
    {"batch": 1},
    {"batch": 5},
    {"batch": 5, "block_size": 8},
    {"batch": 5, "block_size": 8, "num_blocks": 17},  # some are evicted
]


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_steps_are_the_plain_engines(
    k: int, temperature: float, target: Target, head: Eagle3Head
) -> None:
    asked = requests(12, seed=100, sampling=Sampling(temperature, seed=3))

    def decoded(packed: bool, **sizes: Any) -> list[Any]:
        drafter = ChainDrafter(head, k) if k else None
        engine = Engine(target, drafter, max_length=128, packed=packed, **sizes)
        assert isinstance(engine.step.decoder, PackedDecoder if packed else Target)
        if drafter:
            assert isinstance(drafter.passes, PackedHead) == packed
        return told(run(engine, asked))

    expected = decoded(False, batch=5)
    for sizes in SIZES:
        assert decoded(True, **sizes) == expected, sizes


def test_prompts_take_the_steps_way(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' modules run slowly between products; on a GPU a prompt waited for them."""
    engine = Engine(target, ChainDrafter(head, 2), batch=2, max_length=128, packed=True)
    widths: list[int] = []
    states = engine.step.decoder.states

    def seen(token_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        widths.append(token_ids.shape[1])
        return states(token_ids, *rest, **options)

    monkeypatch.setattr(engine.step.decoder, "states", seen)
    monkeypatch.setattr(target, "states", None)
    asked = requests(2, seed=100)
    run(engine, asked)
    assert max(widths) == max(len(request.prompt_ids) for request in asked)


def test_expected_acceptance_is_the_plain_engines(target: Target, head: Eagle3Head) -> None:
    asked = requests(6, seed=100, sampling=Sampling(0.8))
    plain, packed = (
        run(Engine(target, ChainDrafter(head, 3), batch=3, max_length=128, packed=p), asked)
        for p in (False, True)
    )
    for one, other in zip(plain, packed, strict=True):
        assert sum(one.expected) > 0
        assert other.expected == pytest.approx(one.expected, rel=1e-4, abs=1e-5)


def test_packing_is_asked_for(target: Target) -> None:
    """Parity runs and comparisons with the reference engine construct engines without it."""
    assert Engine(target, batch=1, max_length=32).step.decoder is target


def test_a_drafter_forgets_packed_weights(target: Target, head: Eagle3Head) -> None:
    """One drafter in two engines, one after the other."""
    drafter, asked = ChainDrafter(head, 3), requests(3, seed=100)
    plain = told(run(Engine(target, drafter, batch=3, max_length=128), asked))
    assert told(run(Engine(target, drafter, batch=3, max_length=128, packed=True), asked)) == plain
    run(Engine(target, drafter, batch=3, max_length=128), asked)
    assert isinstance(drafter.passes, PlainHead)


def test_an_evaluation_packs_unless_told_not_to(target: Target, head: Eagle3Head) -> None:
    reports = {}
    for packed, words in ((True, "packed for oneDNN"), (False, "packing is off")):
        heard = Heard()
        settings = {"temperatures": 0, "timing_prompts": 0, "certify": False, "packed": packed}
        reports[packed] = evaluate(target, head, monitor=heard, **settings)
        assert words in reports[packed].environment["products"]
        assert any(words in line for line in heard.lines)
    for one, other in zip(reports[True].rows, reports[False].rows, strict=True):
        assert one.accepted_at == other.accepted_at
        assert one.output_tokens == other.output_tokens
    assert reports[True].rows[1].prompts_equal == 1.0
    reference = evaluate(target, head, engine="reference", temperatures=0, timing_prompts=0)
    assert "products" not in reference.environment
