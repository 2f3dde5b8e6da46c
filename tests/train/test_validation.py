"""Which records a validation reads, and which of them count for the predicted AL."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from draftlab.train.settings import TrainSettings
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
