"""Which records a validation reads, and which of them count for the predicted AL."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from draftlab.engine.counters import Counters
from draftlab.train.settings import TrainSettings
from draftlab.train.validation import Validation, Walked, al_text, expected_walk, walk
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.toy_training import orthogonal_parts, toy_answer, trained

SETTINGS = {"steps": 4, "validate_every": 2, "ttt_steps": 2}


def test_training_without_held_out_records_reaches_its_last_step(tmp_path: Path) -> None:
    target, monitor = orthogonal_parts(), RecordingMonitor()
    one_prompt = [replace(toy_answer(target, i), id=f"p~{i}") for i in range(1, 6)]
    trainer = trained(tmp_path, ListStore(one_prompt), target, monitor, **SETTINGS)
    assert (trainer.step, trainer.held_out) == (4, [])
    assert "train.validate_every has no effect" in "\n".join(monitor.lines)


def test_validations_need_held_out_records() -> None:
    with pytest.raises(ValidationError, match="validation_share above 0"):
        TrainSettings(validate_every=2, validation_share=0)


@pytest.mark.parametrize(
    ("temperature", "walked", "sampled"), [(0.0, True, False), (0.7, False, True), (None, 0, 0)]
)
def test_given_answers_predict_no_acceptance_length(
    tmp_path: Path, temperature: float | None, walked: bool, sampled: bool
) -> None:
    target = orthogonal_parts()
    records = [replace(toy_answer(target, i), temperature=temperature) for i in range(20)]
    validation = trained(tmp_path, ListStore(records), target, **SETTINGS).validate()
    assert (validation.walk.drafts > 0, validation.sampled_al is not None) == (walked, sampled)
    assert validation.predicted_al() > 1  # without either, by α


@pytest.mark.parametrize(
    ("prompts", "line"),
    [
        (1, "predicted AL (T = 0) not known: 1 prompt, an interval needs 6 (K = 3, 8 steps)"),
        (5, "predicted AL (T = 0) not known: 5 prompts, an interval needs 6 (K = 3, 40 steps)"),
        (6, "predicted AL (T = 0) 2.000 [2.000, 2.000] of 6 prompts (K = 3, 48 steps)"),
    ],
)
def test_a_prediction_says_how_many_prompts_it_is_of(prompts: int, line: str) -> None:
    """Two answers to one prompt are one prompt."""
    names = [name for i in range(prompts) for name in (f"p{i}", f"p{i}~1")]
    walked = [Walked(name, 4, 4) for name in names]
    steps = 4 * len(walked)
    counters = Counters(3, drafts=steps, accepted=steps)
    assert line in Validation([1.0], [1.0], [0.1], counters, None, [], walked).line()
    warm = Validation([1.0], [1.0], [0.1], Counters(3), 2.0, [], [], walked)
    assert line.partition(" (K")[0].replace("T = 0", "sampled answers") in warm.line()


def test_an_interval_resamples_prompts() -> None:
    records = [Walked(f"p{i}", 8 * (i % 2), 4) for i in range(10)]
    low, high = map(float, al_text(2.0, records)[7:19].split(", "))
    assert 1 <= low < 1.8 < 2.2 < high <= 3
    assert al_text(3.0, [record for record in records if record.accepted][:1]).startswith("not")


def test_the_walk_over_sampled_answers_weighs_positions_by_their_steps() -> None:
    """Half of the answer accepts nothing; the mean over all positions would be 2.5."""
    spans = torch.tensor([0] * 5 + [1] * 401)
    ratios = torch.zeros(406, 3)
    ratios[204:] = 1
    accepted, steps = expected_walk(ratios, spans, 3)
    assert 1 + accepted / steps == pytest.approx(400 / (200 + 50), abs=0.02)
    generator = torch.Generator().manual_seed(0)
    ratios = torch.rand(406, 3, generator=generator)
    draws = [
        walk(torch.rand(406, 3, generator=generator) < ratios, spans, 3)[0] for _ in range(200)
    ]
    expected = [
        float(torch.tensor([getattr(c, n) for c in draws]).double().mean())
        for n in ("accepted", "drafts")
    ]
    assert expected_walk(ratios, spans, 3) == pytest.approx(expected, rel=0.02)


def test_certain_drafts_are_walked_as_greedy_answers_are() -> None:
    """To the last step that fits in an answer."""
    generator = torch.Generator().manual_seed(1)
    for first, second in ((1, 5), (4, 9), (6, 6), (12, 3)):
        spans = torch.tensor([0] * 2 + [1] * first + [0] * 3 + [2] * second)
        hits = torch.rand(len(spans), 3, generator=generator) < 0.6
        counters, _ = walk(hits, spans, 3)
        assert expected_walk(hits.float(), spans, 3) == (counters.accepted, counters.drafts)


def test_a_head_that_knows_its_answers_by_heart_needs_more_prompts(tmp_path: Path) -> None:
    target = orthogonal_parts()
    lines = []
    for steps, prompts in ((1, 12), (12, 10), (12, 12)):
        monitor, answers = RecordingMonitor(), [toy_answer(target, i) for i in range(prompts)]
        settings = {"steps": steps, "ttt_steps": 2, "validation_share": 0.5}
        folder = tmp_path / f"{steps} {prompts}"
        trained(folder, ListStore(answers), target, monitor, **settings)
        lines.append([line for line in monitor.lines if "more prompts would help" in line])
    assert lines[:2] == [[], []]  # not trained; too few prompts to tell
    (line,) = lines[2]
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    last, validation = (json.loads(row) for row in rows[-2:])
    known, new = last["alpha"][0], validation["validation"]["alpha"][0]
    assert len({round(x, 3) for x in (*last["alpha"], *last["accuracy"])}) == 4
    assert known - new > 0.03
    assert f"α is {known:.3f} on the answers trained on and {new:.3f} on held-out" in line
