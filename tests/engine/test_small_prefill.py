"""Prefill in padded shapes gives the reference engine's tokens; on a GPU test_on_gpu.py has it."""

from __future__ import annotations

import pytest

from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.engine.small_prefill import PrefillShape, SmallPrefill
from tests.engine.test_on_gpu import drafter_of, embedded
from tests.helpers.greedy_answers import outcomes, run


class CountingPrefill(SmallPrefill):
    """A prefill that keeps the shapes of its calls, and the numbers of prompts that it leaves."""

    def __call__(self, sequences, shape):
        self.shapes = [*getattr(self, "shapes", []), shape]
        return super().__call__(sequences, shape)

    def batches(self, sequences):
        batches = super().batches(sequences)
        self.left = [len(batch) for batch, shape in batches if shape is None]
        return batches


def small_engine(*arguments, **options) -> Engine:
    engine = Engine(*arguments, **options)
    engine.small_prefill = CountingPrefill(engine.step, None, engine.prefill_tokens)
    return engine


@pytest.mark.parametrize("kind", [None, "chain", "parallel", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_and_counters_are_the_reference_engines(kind: str | None, temperature: float):
    target, heads, prompts = embedded("cpu")
    requests = [Request(i, ids, 8, Sampling(temperature)) for i, ids in prompts[:6]]
    drafter = None if kind is None else drafter_of(heads[kind], temperature)
    expected = outcomes(run(ReferenceEngine(target, drafter, batch=3, max_length=400), requests))
    for options in ({"batch": 3}, {"batch": 1}, {"batch": 3, "num_blocks": 8, "block_size": 64}):
        engine = small_engine(target, drafter, max_length=400, **options)
        assert outcomes(run(engine, requests)) == expected
        assert len(engine.small_prefill.shapes) >= len(requests) // options["batch"]


def test_prompts_that_fit_no_shape_or_several() -> None:
    """Each group of lengths is admitted at once. The engine has 2,048 tokens of a pass."""
    target, heads, prompts = embedded("cpu")
    ids = prompts[0][1][:1]  # the shortest prompt that there can be
    groups = {
        (1,): ([(1, 32)], []),
        (1, 1, 2): ([], [3]),  # equal prompts
        (590,): ([], [1]),
        range(1, 18): ([(16, 32), (1, 32)], []),
        range(1, 33): ([(16, 32), (16, 32)], []),
        range(500, 505): ([(4, 512), (1, 512)], []),
        (590, 3, 580, 200, 1): ([(4, 256)], [2]),  # the two long ones share a pass
        range(1, 34): ([], [33]),  # so many come at the start of a suite alone
    }
    engine = small_engine(target, drafter_of(heads["chain"], 0.0), batch=33, max_length=600)
    for lengths, (shapes, left) in groups.items():
        engine.small_prefill.shapes = []
        requests = [Request(str(n), ids * length, 4) for n, length in enumerate(lengths)]
        answers = {g.id: g.token_ids for g in run(engine, requests)}
        expected = [PrefillShape(*shape, limited=False) for shape in shapes]
        assert (engine.small_prefill.shapes, engine.small_prefill.left) == (expected, left)
        alone = Engine(target, batch=1, max_length=600)
        for request in requests[:: max(len(requests) // 3, 1)]:
            (one,) = run(alone, [request])
            assert answers[request.id] == one.token_ids


@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_several_batches_may_be_in_flight(max_in_flight: int) -> None:
    """As on a GPU. Some answers end with their prefill, and the small pool preempts some others."""
    target, heads, prompts = embedded("cpu")
    drafter = drafter_of(heads["chain"], 0.8)
    requests = [
        Request(i, (*ids[: (1, 20, 32, 33, 60)[n % 5]], n), (1, 2, 9, 30)[n % 4], Sampling(0.8))
        for n, (i, ids) in enumerate(prompts[:24], 1)
    ]
    expected = outcomes(run(ReferenceEngine(target, drafter, batch=8, max_length=100), requests))
    for options in ({}, {"num_blocks": 96, "block_size": 16}, {"prefill_tokens": 96}):
        engine = small_engine(target, drafter, batch=24, max_length=100, **options)
        engine.max_in_flight = max_in_flight
        assert outcomes(run(engine, requests)) == expected
        assert len(engine.small_prefill.shapes) >= 2


def test_a_prompt_with_top_k_beside_one_without() -> None:
    target, _, prompts = embedded("cpu")
    sampling = Sampling(3.0), Sampling(3.0, top_k=2)
    requests = [Request(i, ids, 8, s) for (i, ids), s in zip(prompts[:2], sampling, strict=True)]
    engine = small_engine(target, batch=2, max_length=400)
    expected = outcomes(run(Engine(target, batch=2, max_length=400), requests))
    assert outcomes(run(engine, requests)) == expected
    assert [shape.limited for shape in engine.small_prefill.shapes] == [True]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engines_of_many_slots_prefill_all_prompts_in_shapes(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal prompts and whole suites too; the small shapes stand for those of hundreds of slots."""
    monkeypatch.setattr("draftlab.engine.small_prefill.MANY_SLOTS", 16)
    monkeypatch.setattr(SmallPrefill, "MANY_ROWS", (2, 4))
    target, heads, prompts = embedded("cpu")
    several = [*prompts[:20], *((f"{i} again", ids) for i, ids in prompts[:1])]
    requests = [Request(i, ids, 8, Sampling(temperature)) for i, ids in several]
    drafter = drafter_of(heads["chain"], temperature)
    expected = outcomes(run(ReferenceEngine(target, drafter, batch=8, max_length=400), requests))
    engine = small_engine(target, drafter, batch=16, max_length=400)
    assert outcomes(run(engine, requests)) == expected
    assert {shape.rows for shape in engine.small_prefill.shapes} == {2, 4}
    assert engine.small_prefill.left == []
