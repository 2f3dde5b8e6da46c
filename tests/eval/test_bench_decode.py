"""What the decoding benchmark measures, on a tiny target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.drafter import new_drafter
from draftlab.target_model.model import Target
from tests.helpers.decoding import PARALLEL, target, untrained_head
from tests.helpers.drivers import load

__all__ = ["target"]
bench = load("bench/bench_decode")


@pytest.mark.parametrize("family", [None, {}, PARALLEL])
def test_a_batch_is_measured(target: Target, family: dict[str, Any] | None) -> None:
    drafter = None
    if family is not None:
        head = untrained_head(target, 3, target.vocab_size - 20, **family)
        drafter = new_drafter(head, 3, draft_probs=False)
    measured = bench.measure(target, drafter, 4, prompt=24, new=40)
    assert measured.step_ms > 0
    assert measured.tokens_s > 0
    # A prompt of 24 tokens is a pass like a step's, of more tokens.
    assert measured.step_ms / 20 < measured.ttft_ms < 20 * measured.step_ms
    # Acceptance is synthetic: 0.6 + 0.6² + 0.6³ drafts of three, whatever the head.
    expected = 1 if drafter is None else 1 + 0.6 + 0.6**2 + 0.6**3
    assert measured.tokens_a_step == pytest.approx(expected, abs=0 if drafter is None else 0.5)


def test_each_configuration_is_saved_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--target small --device cpu --prompt-tokens 8 --tokens 4 --batches 1 --probs off"
    file = tmp_path / "steps.json"
    monkeypatch.setattr(sys, "argv", ["bench", *words.split(), "--k", "2", "--results", str(file)])
    bench.main()
    (saved,) = json.loads(file.read_text())
    rows = [part for part in saved["parts"].values() if isinstance(part, dict)]
    assert [(row["k"], row["head"]) for row in rows] == [(0, "chain"), (2, "chain")]
    assert all(row["kv_floor_ms"] > row["floor_ms"] > 0 for row in rows)
    before = capsys.readouterr().out.splitlines()[-2:]
    monkeypatch.setattr(bench, "measure", pytest.fail)
    bench.main()
    assert capsys.readouterr().out.splitlines()[-2:] == before
