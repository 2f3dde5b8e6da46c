"""The benchmarks of load and of the adviser, on a tiny target."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.workload import Workload
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.decoding import untrained_head
from tests.helpers.drivers import load
from tests.helpers.toys import toy_target_folder

measurements = load("measurements")
bench_load, bench_adviser = load("bench/bench_load"), load("bench/bench_adviser")
synthetic = load("bench/synthetic_workload")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(tmp_path_factory.mktemp("target"), layers=4, hidden=32, max_length=128)


def workload(folder: Path, **settings: Any) -> Workload:
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    head = untrained_head(target, 3, target.vocab_size - 20)
    tokens = {"timing_tokens": 40, "max_new_tokens": 40, "k": (1, 2, 3)}
    return synthetic.synthetic_workload(
        target, head, prompts=12, prompt_tokens=8, **tokens | settings
    )


def parts(file: Path | None = None, minutes: float | None = None) -> Any:
    return measurements.Measurements(Namespace(results=file, minutes=minutes))


def test_goodput_is_measured_with_synthetic_acceptance(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = workload(folder, concurrency=(2,), k=(1, 3))
    options = {"synthetic": True, "rounds": 2, "seconds": 0.0}
    points = bench_load.measure(lambda: made, (2,), parts(), **options)
    assert [(p.k, p.concurrency, p.requests) for p in points] == [
        (0, 2, 10),
        (1, 2, 10),
        (3, 2, 10),
    ]
    assert points[1].acceptance_at == pytest.approx([0.6], abs=0.12)
    assert points[2].acceptance_at == pytest.approx([0.6, 0.36, 0.216], abs=0.12)
    assert {p.output_tokens for p in points} == {400}
    bench_load.show(points)
    text = capsys.readouterr().out
    assert "chain, K=3, argmax drafts" in text
    assert text.count("*") == 1


def test_every_inner_k_is_predicted_from_the_others(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = workload(folder, timing_batches=(1, 2), timing_prompts=4)
    timings = bench_adviser.measure(lambda: made, (1, 2), parts(), "tiny", rounds=3)
    assert sorted(timings) == [(b, k) for b in (1, 2) for k in (0, 1, 2, 3)]
    summary = bench_adviser.check(timings)
    assert summary["timed"] == 2
    assert f"{summary['close']} of 2 predictions within 5 %" in capsys.readouterr().out


def test_a_measured_batch_is_not_timed_again(folder: Path, tmp_path: Path) -> None:
    file, made = tmp_path / "adviser.json", workload(folder, timing_batches=(1, 2))
    options = {"rounds": 2}
    first = bench_adviser.measure(lambda: made, (1,), parts(file), "tiny", **options)
    again = bench_adviser.measure(pytest.fail, (1,), parts(file), "tiny", **options)
    late = parts(file, minutes=0)
    assert bench_adviser.measure(pytest.fail, (1, 2), late, "tiny", **options) == again == first


def test_a_disturbed_round_does_not_spoil_a_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pause of hundreds of steps in one of five rounds of one configuration."""
    made, batch, rounds = workload(folder, timing_batches=(2,)), 2, 5
    head = made.configs[1]
    runs = {
        config: bench_adviser.TimedRun(
            [answer(tokens, 0.01 * config.k + 0.1) for _ in range(rounds * batch)], 1.0
        )
        for config, tokens in ((made.configs[0], 1), (head, 2))
    }
    calm = bench_adviser.median_timing(made, runs, head, batch)
    assert calm.speedup == pytest.approx(2 / 1.1)
    for row in (4, 5):
        one = runs[head].generations[row]
        runs[head].generations[row] = replace(one, total_s=one.total_s + 300.0)
    disturbed = bench_adviser.median_timing(made, runs, head, batch)
    assert made.timing(runs, head, batch, None).step_ms > 5 * calm.step_ms
    assert (disturbed.step_ms, disturbed.speedup) == (calm.step_ms, calm.speedup)
    assert disturbed.tokens_per_step == calm.tokens_per_step == 2
    assert "1 of 5 rounds took more than 1.5 times the median" in capsys.readouterr().out


def answer(tokens: int, step_s: float) -> Generation:
    """Return an answer of 41 tokens whose steps have so many."""
    steps = 40 // tokens
    counters = Counters(tokens - 1)
    for _ in range(steps):
        counters.add_step(tokens - 1, tokens - 1)
    times = 0.5, 0.5 + steps * step_s
    return Generation("", (1,) * 41, "length", counters, (), ((0, 0),) * steps, *times)
