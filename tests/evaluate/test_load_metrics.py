"""Goodput and percentiles of a simulation whose every token has a known time."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, islice

import numpy as np
import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.decoding_config import PLAIN_DECODING
from draftlab.evaluate.load import (
    LoadRound,
    LoadRun,
    Stream,
    busy_seconds,
    decode_stream,
    load_streams,
)
from draftlab.evaluate.load_metrics import load_point
from draftlab.intervals import quantile_intervals
from tests.helpers.simulated_server import (
    PREFILL_S,
    STEP_S,
    Simulation,
    simulate,
    streams_of,
    varied_requests,
)

CONDITIONS = {"config": PLAIN_DECODING, "engine": "a simulation", "temperature": 0.0}


@pytest.mark.parametrize(("concurrency", "gap_s"), [(1, 0.0), (4, 0.0), (16, 0.0), (4, 0.02)])
def test_goodput_is_the_tokens_in_a_steady_window(concurrency: int, gap_s: float) -> None:
    run, engine = simulate(concurrency, gap_s=gap_s)
    point = load_point(run, None, concurrency=concurrency, **CONDITIONS)
    half = run.measured[: len(run.measured) // 2]
    times = np.array(engine.token_times)
    start, stop = min(g.started_s for g in half), max(g.started_s for g in half)
    counted = ((times > start) & (times <= stop)).sum() / (stop - start)
    assert point.goodput_tok_s == pytest.approx(counted, rel=0.02)
    low, high = point.goodput_tok_s_ci
    assert low < point.goodput_tok_s < high
    assert point.output_tokens == sum(len(g.token_ids) for g in run.measured)


def test_idle_slots_lower_the_goodput() -> None:
    """A server that leaves slots empty is not credited with the requests that it did not run."""

    class Half(Simulation):
        def __init__(self, concurrency: int) -> None:
            super().__init__(concurrency // 2)

    run = LoadRun()
    for stream in streams_of(varied_requests(200), 200, 8):
        decode_stream(Half(8), stream, run)
    point = load_point(run, None, concurrency=8, **CONDITIONS)
    assert point.mean_running == pytest.approx(4, rel=0.01)
    assert "only 4.0 requests ran at once" in point.warnings[0]
    full, _ = simulate(4, 200)
    honest = load_point(full, None, concurrency=4, **CONDITIONS).goodput_tok_s
    assert point.goodput_tok_s == pytest.approx(honest, rel=0.05)


def test_times_of_requests_are_exact() -> None:
    run, _ = simulate(1, 40, tokens_a_step=3)
    point = load_point(run, None, concurrency=1, **CONDITIONS)
    tpots = [1e3 * (g.total_s - g.first_token_s) / (len(g.token_ids) - 1) for g in run.measured]
    assert (point.tpot_ms.p50, point.tpot_ms.p90, point.tpot_ms.p99) == pytest.approx(
        np.quantile(tpots, [0.5, 0.9, 0.99])
    )
    assert point.ttft_ms.p50 == pytest.approx(1e3 * PREFILL_S)
    assert point.ttft_ms.p50_ci == pytest.approx((1e3 * PREFILL_S, 1e3 * PREFILL_S))
    assert point.step_ms == pytest.approx(1e3 * STEP_S)
    assert 2.5 < point.tokens_per_step <= 3
    assert point.user_tok_s == pytest.approx(point.tokens_per_step / STEP_S)


def test_prefills_of_others_are_part_of_a_step_and_of_the_percentiles() -> None:
    run, _ = simulate(16)
    point = load_point(run, None, concurrency=16, **CONDITIONS)
    assert point.step_ms > 1e3 * STEP_S
    assert point.tpot_ms.p50 < point.tpot_ms.p90 < point.tpot_ms.p99
    for name in ("p50", "p90", "p99"):
        low, high = getattr(point.tpot_ms, f"{name}_ci")
        assert low <= getattr(point.tpot_ms, name) <= high


def test_the_ratio_to_plain_decoding_is_paired() -> None:
    plain, twice = (simulate(4, tokens_a_step=n)[0] for n in (1, 2))
    slow = np.random.default_rng(5).uniform(1, 3, len(plain.measured))  # prompts that take longer
    for run in (plain, twice):
        factors = iter(slow)
        run.rounds = [
            replace(one, measured=[replace(g, total_s=g.total_s * next(factors)) for g in measured])
            for one in run.rounds
            for measured in [one.measured]
        ]
    point = load_point(twice, plain, concurrency=4, **CONDITIONS)
    alone = [load_point(run, None, concurrency=4, **CONDITIONS) for run in (twice, plain)]
    assert point.speedup == pytest.approx(alone[0].goodput_tok_s / alone[1].goodput_tok_s)
    low, high = point.speedup_ci
    assert low < point.speedup < high
    unpaired = math.hypot(*(math.log(p.goodput_tok_s_ci[1] / p.goodput_tok_s_ci[0]) for p in alone))
    assert math.log(high / low) < 0.3 * unpaired
    same = load_point(plain, plain, concurrency=4, **CONDITIONS)
    assert (same.speedup, *same.speedup_ci) == pytest.approx((1, 1, 1))


def test_intervals_under_load_resample_prompts_whatever_streams_were_measured() -> None:
    """Six prompts, half of them four times as slow; the second stream was not measured.

    The requests of one prompt are alike. So every interval runs from the fast prompts' value to
    the slow ones', with as many requests as may be; a grouping that mixes prompts narrows it.
    """
    suite = varied_requests(6)
    slow_ids = {request.id for request in suite[1::2]}
    streams = load_streams(suite, 7, 1)
    first, _ = next(streams), next(streams)
    assert first.prompts == [0, 1, 2, 3, 4, 5, 0]
    plain, run = LoadRun(), LoadRun()
    for stream in chain([first], islice(streams, 5)):
        names = [request.id.partition(" ")[0] for request in stream.measured]
        assert [suite[prompt].id for prompt in stream.prompts] == names
        for of, slow in ((plain, 1.0), (run, 4.0)):
            factors = [slow if name in slow_ids else 1.0 for name in names]
            measured = [timed_generation(n, f) for n, f in zip(names, factors, strict=True)]
            of.rounds.append(LoadRound(measured, stream.prompts, 7.0, 7.0))
    point = load_point(run, plain, concurrency=1, **CONDITIONS)
    assert point.requests == 42
    assert point.goodput_tok_s_ci == pytest.approx((11 / 4, 11.0))
    assert point.user_tok_s_ci == pytest.approx((10 / 3.6, 10 / 0.9))
    assert point.speedup_ci == pytest.approx((1 / 4, 1.0))
    for name in ("p50", "p90", "p99"):
        assert getattr(point.ttft_ms, f"{name}_ci") == pytest.approx((100.0, 400.0))
        assert getattr(point.tpot_ms, f"{name}_ci") == pytest.approx((90.0, 360.0))
    with pytest.raises(ValueError, match="the same streams"):
        load_point(run, LoadRun(plain.rounds[:5]), concurrency=1, **CONDITIONS)


def timed_generation(name: str, factor: float) -> Generation:
    """Return eleven tokens in `factor` seconds, the first of them after a tenth of these."""
    counters, steps = Counters(0, undrafted_steps=10), ((0, 0),) * 10
    times = 0.1 * factor, factor, 0.0
    return Generation(name, (1,) * 11, "length", counters, (), steps, *times)


def test_answers_of_one_token_have_no_tpot() -> None:
    stream = Stream([], [Request(str(i), (1,), 1) for i in range(4)], [], [*range(4)])
    run = LoadRun()
    decode_stream(Simulation(2), stream, run)
    point = load_point(run, None, concurrency=2, **CONDITIONS)
    assert point.tpot_ms is point.user_tok_s is point.step_ms is point.acceptance_length is None
    assert point.output_tokens == 4


def test_busy_seconds_are_cut_at_both_ends() -> None:
    done = [
        Generation("", (1,), "stop", Counters(0), (), (), 0.1, total, start)
        for start, total in ((0.0, 2.0), (1.5, 1.0), (2.5, 9.0), (4.0, 1.0))
    ]
    assert busy_seconds(done, 1.0, 3.0) == pytest.approx(1.0 + 1.0 + 0.5)


def test_quantile_intervals_resample_prompts() -> None:
    """Values of one prompt stay together, in any order and number."""
    generator = np.random.default_rng(2)
    prompts = generator.permutation(np.repeat(np.arange(30), 4))
    values = prompts + 0.01 * generator.random(len(prompts))
    ((low, high),) = quantile_intervals(values, prompts, [0.5])
    ((alone_low, alone_high),) = quantile_intervals(values, np.arange(len(values)), [0.5])
    assert high - low > 1.6 * (alone_high - alone_low)
    ragged = quantile_intervals(values[1:], prompts[1:], [0.5, 0.9])
    assert ragged[0] == pytest.approx((low, high), abs=1.5)
    assert quantile_intervals(np.full(6, 2.0), np.arange(6), [0.99]) == [(2.0, 2.0)]
    assert quantile_intervals(np.full(60, 2.0), np.arange(60) % 5, [0.99]) == [None]
