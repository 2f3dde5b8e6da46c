"""A head trained by draftlab learns an answer's first draft, which follows a rule of its own."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from draftlab.errors import UserError
from draftlab.files import sha256_text
from draftlab.target_model.parts import TargetParts
from draftlab.text.conversations import answer_id
from draftlab.train.batch.packing import pack
from draftlab.train.loop import Trainer
from draftlab.train.metrics import MetricsLog
from draftlab.train.objectives.loss import DraftTeacher
from draftlab.train.validation import score, walk
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import InterruptingMonitor, SignallingMonitor
from tests.helpers.synthetic import spans_of
from tests.helpers.toy_training import (
    ANSWER,
    PROMPT,
    assert_same_weights,
    orthogonal_parts,
    toy_answer,
    trained,
)


def accuracies(trainer: Trainer, target: TargetParts) -> tuple[float, float]:
    """Share of right drafts of an answer's first draft, and of the others, on fresh answers."""
    records = [toy_answer(target, 1000 + i) for i in range(30)]
    batch = pack([[r] for r in records], 64, 3)
    hits = score(trainer.head, DraftTeacher.of(target, trainer.head), batch).hits
    reach = batch.steps[0].index.new_tensor([PROMPT - 1])
    first = hits[:, reach, 0].float().mean()
    others = hits[:, PROMPT : PROMPT + ANSWER - 2, 0].float().mean()
    return float(first), float(others)


def test_first_draft_and_the_rest_are_learnt(tmp_path: Path) -> None:
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(300)])
    first, others = accuracies(trained(tmp_path, store, target, steps=120), target)
    assert first > 0.95
    assert others > 0.95


def test_resumed_training_ends_with_the_same_bits(tmp_path: Path) -> None:
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    whole = trained(tmp_path / "whole", store, target, steps=12)

    settings = {"steps": 12, "checkpoint_every": 4, "log_every": 1}
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", store, target, InterruptingMonitor("train", 9), **settings)
    # A process that was killed while it wrote the checkpoint of a signal.
    killed = tmp_path / "cut/checkpoints/.step-0000009.tmp"
    killed.mkdir()
    (killed / "weights.safetensors").write_text("")
    resumed = trained(tmp_path / "cut", store, target, **settings)
    assert not killed.exists()
    assert_same_weights(whole, resumed)
    assert resumed.tokens_seen == whole.tokens_seen
    steps = [
        line.split(",")[0] for line in (tmp_path / "cut/metrics.jsonl").read_text().split("\n")
    ]
    assert len([s for s in steps if s]) == 13  # twelve steps, each once, and the validation


def test_a_kill_while_metrics_are_cut_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"step": step})
    monkeypatch.setattr("draftlab.files.os.replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        log.truncate(2, 9)
    monkeypatch.undo()
    assert len(log.path.read_text().splitlines()) == 3
    log.truncate(2, 9)
    assert len(log.path.read_text().splitlines()) == 2


def test_a_training_continues_with_other_passes(tmp_path: Path) -> None:
    """Few GPUs or too little memory must not mean a training from step 0."""
    target, monitor = orthogonal_parts(), RecordingMonitor()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    settings = {"steps": 12, "checkpoint_every": 4, "log_every": 1}
    whole = trained(tmp_path / "whole", store, target, **settings)
    interrupting = InterruptingMonitor("train", 9)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut", store, target, interrupting, micro_rows=4, **settings)
    other = {"micro_rows": 1, "anchor_parts": 3}
    resumed = trained(tmp_path / "cut", store, target, monitor, **settings, **other)
    assert "resuming training after step 8" in monitor.lines
    assert_same_weights(whole, resumed, rtol=1e-3, atol=1e-4)


def test_passes_are_part_of_the_key_where_the_loss_depends_on_them(tmp_path: Path) -> None:
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    trained(tmp_path, store, target, steps=1, loss="lk", micro_rows=2)
    with pytest.raises(UserError, match="another recipe"):
        trained(tmp_path, store, target, steps=1, loss="lk", micro_rows=1)


def test_walk_counts_as_a_server_does() -> None:
    spans = spans_of([(2, 9)])  # answer at 2..10; chains with K = 2 fit from t = 1 to t = 7
    hits = torch.zeros(len(spans), 2, dtype=torch.bool)
    hits[1] = torch.tensor([True, True])  # from t = 1 both: next t = 4
    hits[4] = torch.tensor([False, True])  # none: next t = 5
    hits[5] = torch.tensor([True, False])  # one: next t = 7
    counters, steps = walk(hits, spans, 2)
    assert steps == [(1, 2), (4, 0), (5, 1), (7, 0)]
    assert (counters.drafts, counters.accepted, counters.accepted_at) == (4, 3, [2, 1])


def test_a_validation_reads_a_limited_number_of_records(tmp_path: Path) -> None:
    target, monitor = orthogonal_parts(), RecordingMonitor()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    settings = {"steps": 2, "validation_share": 0.5}
    whole = trained(tmp_path / "whole", store, target, monitor, **settings)
    assert not any(line.startswith("validation: ") for line in monitor.lines)
    part = trained(tmp_path / "part", store, target, monitor, validation_records=5, **settings)
    assert any(line.startswith("validation: 5 of 20 held-out") for line in monitor.lines)
    # So that the weights do not depend on it.
    assert part.training.tolist() == whole.training.tolist()
    assert part.key == whole.key
    assert len(part.held_out) == 5
    assert set(part.held_out) < set(whole.held_out)
    ids = sorted((store.ids[i] for i in whole.held_out), key=sha256_text)
    assert {store.ids[i] for i in part.held_out} == set(ids[:5])
    drafts = [
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1])
        for name in ("whole", "part")
    ]
    assert drafts[0]["validation"]["walk_drafts"] > 3 * drafts[1]["validation"]["walk_drafts"] > 0


def test_a_signal_ends_training_with_a_checkpoint(tmp_path: Path) -> None:
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    settings = {"steps": 12, "checkpoint_every": 7, "log_every": 1}
    whole = trained(tmp_path / "whole", store, target, **settings)
    for step, number in ((9, signal.SIGTERM), (10, signal.SIGHUP), (12, signal.SIGTERM)):
        monitor = SignallingMonitor(number, step)
        with pytest.raises(SystemExit) as ended:
            trained(tmp_path / "cut", store, target, monitor, **settings)
        assert ended.value.code == 128 + number
        assert monitor.lines[-1].startswith(f"{number.name}: a checkpoint of step {step} is")
        assert (tmp_path / f"cut/checkpoints/step-{step:07d}").is_dir()
    resumed = trained(tmp_path / "cut", store, target, **settings)
    assert_same_weights(whole, resumed)
    path = tmp_path / "cut/metrics.jsonl"
    for _ in range(2):  # the second time as if the head had been lost
        steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
        assert steps == [*range(1, 13), 12]  # the last is of the validation
        trained(tmp_path / "cut", store, target, **settings)


def test_further_answers_are_on_their_prompts_side(tmp_path: Path) -> None:
    target, heard = orthogonal_parts(), RecordingMonitor()
    records = [
        replace(toy_answer(target, i), id=answer_id(f"p-{i % 4}", i // 4)) for i in range(12)
    ]
    trainer = trained(tmp_path / "four", ListStore(records), target, heard, steps=1)
    assert len(trainer.held_out) == 3
    assert {i % 4 for i in trainer.held_out}.isdisjoint(i % 4 for i in trainer.training)
    assert not any("validation: none" in line for line in heard.lines)

    store = ListStore([record for record in records if record.id.startswith("p-1")])
    alone = trained(tmp_path / "one", store, target, heard, steps=1)
    assert alone.training.tolist() == [0, 1, 2]
    assert "validation: none, since all records answer one prompt" in heard.lines
