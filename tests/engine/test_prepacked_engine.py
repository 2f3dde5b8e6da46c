"""The engine on prepacked products has the plain engine's tokens and steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftlab.engine.drafter import ChainDrafter
from draftlab.engine.eager_head import EagerHead
from draftlab.engine.engine import Engine
from draftlab.engine.prepacked_head import PrepackedHead
from draftlab.engine.sampling import Sampling
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.kernels.cpu_prepacked_linear import why_no_prepacking
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import PrepackedDecoder
from tests.helpers.evaluation import evaluate
from tests.helpers.greedy_answers import outcomes, requests, run
from tests.helpers.monitors import RecordingMonitor

pytestmark = pytest.mark.skipif(
    why_no_prepacking(torch.device("cpu"), torch.float32) is not None, reason="no packed products"
)


SIZES: list[dict[str, Any]] = [
    {"batch": 1},
    {"batch": 5},
    {"batch": 5, "block_size": 8},
    {"batch": 5, "block_size": 8, "num_blocks": 17},  # some are preempted
]


@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_steps_equal_the_plain_engine(
    k: int, temperature: float, target: Target, head: Eagle3Head
) -> None:
    prompts = requests(12, seed=100, sampling=Sampling(temperature, seed=3))

    def decoded(packed: bool, **sizes: Any) -> list[Any]:
        drafter = ChainDrafter(head, k) if k else None
        engine = Engine(target, drafter, max_length=128, cpu_prepacked=packed, **sizes)
        assert isinstance(engine.step.decoder, PrepackedDecoder if packed else Target)
        if drafter:
            assert isinstance(drafter.runner, PrepackedHead) == packed
        return outcomes(run(engine, prompts))

    expected = decoded(False, batch=5)
    for sizes in SIZES:
        assert decoded(True, **sizes) == expected, sizes


def test_prompts_use_the_decode_path(
    target: Target, head: Eagle3Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' modules are slow between products."""
    engine = Engine(target, ChainDrafter(head, 2), batch=2, max_length=128, cpu_prepacked=True)
    widths: list[int] = []
    states = engine.step.decoder.states

    def record_width(token_ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        widths.append(token_ids.shape[1])
        return states(token_ids, *rest, **options)

    monkeypatch.setattr(engine.step.decoder, "states", record_width)
    monkeypatch.setattr(target, "states", None)
    prompts = requests(2, seed=100)
    run(engine, prompts)
    assert max(widths) == max(len(request.prompt_ids) for request in prompts)


def test_expected_acceptance_equals_the_plain_engine(target: Target, head: Eagle3Head) -> None:
    prompts = requests(6, seed=100, sampling=Sampling(0.8))
    plain, packed = (
        run(
            Engine(target, ChainDrafter(head, 3), batch=3, max_length=128, cpu_prepacked=p), prompts
        )
        for p in (False, True)
    )
    for one, other in zip(plain, packed, strict=True):
        assert sum(one.expected) > 0
        assert other.expected == pytest.approx(one.expected, rel=1e-4, abs=1e-5)


def test_prepacking_is_off_by_default(target: Target) -> None:
    """Parity runs and comparisons with the reference engine rely on it."""
    assert Engine(target, batch=1, max_length=32).step.decoder is target


def test_a_drafter_can_return_to_plain_weights(target: Target, head: Eagle3Head) -> None:
    """One drafter in two engines, one after the other."""
    drafter, prompts = ChainDrafter(head, 3), requests(3, seed=100)
    plain = outcomes(run(Engine(target, drafter, batch=3, max_length=128), prompts))
    assert (
        outcomes(run(Engine(target, drafter, batch=3, max_length=128, cpu_prepacked=True), prompts))
        == plain
    )
    run(Engine(target, drafter, batch=3, max_length=128), prompts)
    assert isinstance(drafter.runner, EagerHead)


def test_an_evaluation_prepacks_by_default(target: Target, head: Eagle3Head) -> None:
    reports = {}
    for packed, words in ((True, "packed for oneDNN"), (False, "packing is off")):
        heard = RecordingMonitor()
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
