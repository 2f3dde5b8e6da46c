"""The benchmark of load, on a tiny target."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from draftlab.evaluate.workload import Workload
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.decoding import untrained_head
from tests.helpers.drivers import load
from tests.helpers.toys import toy_target_folder

measurements = load("measurements")
bench_load = load("bench/bench_load")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(tmp_path_factory.mktemp("target"), layers=4, hidden=32, max_length=128)


def workload(folder: Path, **settings: Any) -> Workload:
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    head = untrained_head(target, 3, target.vocab_size - 20)
    tokens = {"timing_tokens": 40, "max_new_tokens": 40, "k": (1, 2, 3)}
    return bench_load.synthetic_workload(
        target, head, prompts=12, prompt_tokens=8, **tokens | settings
    )


def test_goodput_is_measured_with_synthetic_acceptance(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = workload(folder, concurrency=(2,), k=(1, 3))
    parts = measurements.Measurements(Namespace(results=None))
    points = bench_load.measure(lambda: made, (2,), parts, rounds=2, seconds=0.0)
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
