"""Measurement under load: streams, the closed loop, the engine, and the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.engine.small_prefill import SmallPrefill
from draftlab.evaluate import measure
from draftlab.evaluate.decoding_config import PLAIN_DECODING, DecodingConfig, NamedHead
from draftlab.evaluate.load import (
    LoadRun,
    Stream,
    decode_stream,
    decode_under_load,
    load_streams,
)
from draftlab.evaluate.results import LoadPoint, Report
from draftlab.evaluate.settings import EvalSettings
from draftlab.heads.eagle3 import Eagle3Head
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache
from tests.helpers.evaluation import evaluate
from tests.helpers.greedy_answers import requests
from tests.helpers.simulated_server import (
    STEP_S,
    Simulation,
    streams_of,
    varied_requests,
)

# -- streams


@pytest.mark.parametrize(("prompts", "concurrency"), [(10, 1), (3, 4), (64, 8), (0, 2)])
def test_streams_measure_enough_requests_once_each(prompts: int, concurrency: int) -> None:
    suite = varied_requests(7)
    streams = streams_of(suite, prompts, concurrency)
    measured = [request for stream in streams for request in stream.measured]
    every = [request for stream in streams for request in stream.requests]
    assert len(measured) >= max(prompts, 4 * concurrency)
    assert [r.prompt_ids for r in measured] == [
        suite[i % 7].prompt_ids for i in range(len(measured))
    ]
    assert measured[: len(suite)] == suite[: len(measured)]
    assert len({request.id for request in every}) == len(every)
    for stream in streams:
        assert len(stream.starting) == concurrency
        assert stream.requests[concurrency : -len(stream.following)] == stream.measured


def test_starting_requests_end_one_after_the_other() -> None:
    (stream, _) = streams_of([Request("a", (1,), 64)], 1, 4)
    assert [request.max_new_tokens for request in stream.starting] == [16, 32, 48, 64]
    (stream, _) = streams_of([Request("a", (1,), 2)], 1, 4)
    assert [request.max_new_tokens for request in stream.starting] == [1, 1, 2, 2]


def test_a_round_ends_with_its_measured_requests() -> None:
    """The requests that follow keep the load up, and the drain is not decoded."""
    (stream, _) = streams_of(varied_requests(40), 40, 4)
    engine = Simulation(4)
    run = LoadRun()
    decode_stream(engine, stream, run)
    assert [g.id for g in run.measured] == [r.id for r in stream.measured]
    last = max(g.started_s + g.total_s for g in run.measured)
    assert max(engine.token_times) == pytest.approx(last)
    assert run.mean_running == pytest.approx(4)


@pytest.mark.parametrize("graphs", [None, "graphs"])
def test_configurations_take_turns_there_and_back(graphs: str | None) -> None:
    """All configurations are warmed up again after the last capture of a graph."""
    order: list[int] = []

    class Logged(Simulation):
        def generate(self, requests: Sequence[Request]) -> Iterator[Generation]:
            order.append(self.tokens_a_step)
            return super().generate(requests)

    configs = [PLAIN_DECODING, DecodingConfig(k=1), DecodingConfig(k=2)]
    engines = {c: Logged(2, tokens_a_step=c.k + 1) for c in configs}
    for engine in engines.values():
        engine.graphs = graphs
    suite = varied_requests(20)
    streams = load_streams(suite, 10, 2)
    calls: list[tuple[int, int]] = []
    runs = decode_under_load(engines, suite, streams, lambda *call: calls.append(call))
    warm_up = [1, 1, 2, 2, 3, 3]  # a stream, and the longest prompt
    assert order == [*warm_up * (2 if graphs else 1), *(1, 2, 3), *(3, 2, 1)]
    assert calls[-1] == (6, 6)
    assert {len(run.measured) for run in runs.values()} == {20}


def test_streams_follow_until_every_configuration_was_measured_for_long_enough() -> None:
    """The faster configuration needs more of them; both decode the same ones."""
    suite = varied_requests(20)
    fast = DecodingConfig(k=3)
    engines = {PLAIN_DECODING: Simulation(2), fast: Simulation(2, tokens_a_step=4)}
    calls: list[tuple[int, int]] = []
    options = {"rounds": 3, "least_s": 6.0}
    runs = decode_under_load(
        engines, suite, load_streams(suite, 6, 2), lambda *call: calls.append(call), **options
    )
    ids = [[g.id for g in run.measured] for run in runs.values()]
    assert ids[0] == ids[1]
    last = len(runs[fast].rounds[-1].measured) * STEP_S * 60 / 2
    assert 6.0 <= runs[fast].seconds <= 6.0 + 2 * last
    assert runs[PLAIN_DECODING].seconds > 2 * runs[fast].seconds
    assert calls[-1] == (2 * len(runs[fast].rounds),) * 2


# -- the engine, the evaluation and the report


def test_tokens_do_not_depend_on_the_load(target: Target) -> None:
    suite = requests(6, seed=30)
    alone = {g.id: g for g in Engine(target, batch=2, max_length=target.max_length).generate(suite)}
    for concurrency in (1, 3):
        run, engine = LoadRun(), Engine(target, batch=concurrency, max_length=target.max_length)
        for stream in streams_of(suite, 6, concurrency):
            decode_stream(engine, stream, run)
        for generation in run.measured:
            assert generation.token_ids == alone[generation.id.partition(" ")[0]].token_ids
        assert run.mean_running == pytest.approx(concurrency, rel=0.05)
        assert min(g.started_s for g in run.measured) > 0


def test_nothing_is_captured_in_a_window(target: Target, head: Eagle3Head) -> None:
    """Prompts of the second stream are longer than all those of the first one."""
    engine = Engine(target, new_drafter(head, 2, confidence=True), batch=2, max_length=160)
    prefill = engine.small_prefill = SmallPrefill(engine.step, None, max_tokens=2048)

    def stream(length: int) -> Stream:
        requests = [Request(f"{length}-{i}", (*(5, 6) * length, 2 + i), 6) for i in range(10)]
        return Stream(requests[:2], requests[2:6], requests[6:], [*range(2, 6)])

    captured: list[Any] = []
    capture, generate = prefill._capture, engine.generate
    measured = 0

    def counted(requests: Sequence[Request]) -> Any:
        nonlocal measured
        measured += len(requests) == 10  # a whole stream
        yield from generate(requests)

    def recorded(*arguments: Any) -> Any:
        captured.append(measured)
        return capture(*arguments)

    prefill._capture, engine.generate = recorded, counted
    streams = [stream(3), stream(60)]
    suite = [request for each in streams for request in each.requests]
    decode_under_load({PLAIN_DECODING: engine}, suite, iter(streams), lambda *_: None)
    assert measured == len(streams)
    assert captured
    assert set(captured) == {0}


def test_an_evaluation_under_load(target: Target, head: Eagle3Head, tmp_path: Path) -> None:
    report = evaluate(target, head, concurrency="1,2", k=(1, 3), timing_prompts=0)
    points = {(p.temperature, p.concurrency, p.configuration): p for p in report.load}
    names = {t: [p.configuration for p in report.load if p.temperature == t] for t in (0.0, 0.8)}
    drafted = [f"a head, K={k}, {how} drafts" for k in (1, 3) for how in ("argmax", "sampled")]
    assert names[0.8] == 2 * ["no drafting", *drafted]
    assert names[0.0] == 2 * ["no drafting", drafted[0], drafted[2]]
    assert [p.concurrency for p in report.load if p.temperature] == [1] * 5 + [2] * 5
    for (t, concurrency, _), point in points.items():
        plain = points[t, concurrency, "no drafting"]
        assert point.requests == 4 * concurrency
        assert point.mean_running == pytest.approx(concurrency, rel=0.1)
        if t == 0:  # equal tokens, so that the ratio compares times alone
            assert point.output_tokens == plain.output_tokens
        if point is plain:
            assert point.speedup is point.acceptance_length is None
        else:
            assert point.speedup == pytest.approx(point.goodput_tok_s / plain.goodput_tok_s)
            assert point.acceptance_length == pytest.approx(1 + sum(point.acceptance_at))
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json").load == report.load
    with pytest.raises(ValidationError, match="goodput_tok_s"):
        LoadPoint.model_validate(report.load[0].model_dump() | {"goodput_tok_s": None})


def test_a_short_kv_cache_is_told_and_changes_no_token(target: Target, head: Eagle3Head) -> None:
    new_kv_pool = measure.new_kv_pool

    def short_pool(*arguments: Any, **options: Any) -> PagedCache:
        return new_kv_pool(*arguments, **options | {"num_blocks": 2})

    settings = {"concurrency": 3, "temperatures": 0, "timing_prompts": 0, "k": 3, "batch": 1}
    whole = evaluate(target, head, **settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "new_kv_pool", short_pool)
        short = evaluate(target, head, **settings)
    assert [p.output_tokens for p in short.load] == [p.output_tokens for p in whole.load]
    for point in short.load:
        assert point.mean_running < 2.5
        told = "at concurrency 3 free memory holds the keys and values of 2 requests of"
        assert any(text.startswith(told) for text in point.warnings)
    assert not any("free memory" in text for point in whole.load for text in point.warnings)


@pytest.mark.parametrize("value", ["0", "2,-1", "many", [4096], "1,,2"])
def test_bad_concurrencies_are_refused(value: object) -> None:
    with pytest.raises(ValidationError, match="concurrency"):
        EvalSettings(concurrency=value)


def test_concurrencies_are_a_list_without_repetitions() -> None:
    assert EvalSettings().concurrency == ()
    assert EvalSettings(concurrency="1,8,1").concurrency == (1, 8)
    assert EvalSettings(concurrency=4).concurrency == (4,)


def test_at_temperature_zero_a_configuration_is_named_by_its_argmax_drafts() -> None:
    head = cast(NamedHead, SimpleNamespace(name="head"))
    config = DecodingConfig(head, 3, draft_probs=True)
    assert config.name_at(0.8) == "head, K=3, sampled drafts"
    assert config.name_at(0) == "head, K=3, argmax drafts"
    assert DecodingConfig().name_at(0.8) == "no drafting"
