"""The best validation's head, kept in train/best/."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab import Pipeline, load_recipe
from draftlab.engine.counters import Counters
from draftlab.heads.folder import load_config, load_head
from draftlab.heads.head import DraftHead
from draftlab.train import loop
from draftlab.train.best_head import BestHead
from draftlab.train.loop import Trainer
from draftlab.train.validation import Validation
from tests.helpers.list_store import ListStore
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import SignallingMonitor, copy_of_finished, finished
from tests.helpers.toy_training import orthogonal_parts, toy_answer, trained

ACCEPTED = [20, 50, 40, 45, 30, 90, 10]
"""Of 100 drafts, by validation: AL 1.2, 1.5, 1.4 …"""
SETTINGS = {"steps": 14, "validate_every": 2, "checkpoint_every": 5, "log_every": 1}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replaces validations: that of step 2 n has AL 1 + ACCEPTED[n − 1] / 100. Returns steps."""
    steps: list[int] = []

    def validate(self: Trainer) -> Validation:
        steps.append(self.step)
        counters = Counters(1, drafts=100, accepted=ACCEPTED[(self.step - 1) // 2])
        return Validation([0.5], [0.5], [1.0], counters, None, [])

    def of_trainer(self: Trainer, original: Callable[[Trainer], Validation]) -> Validation:
        self_validate = validate(self)
        loop.validate = lambda *_, **__: self_validate  # type: ignore[assignment]
        return original(self)

    finished()  # with its own validations: other tests share it
    original = Trainer.validate
    monkeypatch.setattr(loop, "validate", loop.validate)  # restored at the end
    monkeypatch.setattr(Trainer, "validate", lambda self: of_trainer(self, original))
    return steps


def run(folder: Path, monitor: Any = None, **settings: Any) -> Trainer:
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(40)])
    return trained(folder, store, target, monitor or RecordingMonitor(), **SETTINGS | settings)


def loaded(folder: Path) -> DraftHead:
    parts = orthogonal_parts()
    return load_head(folder, target_tensors=parts.shared_tensors, dtype=torch.float32, device="cpu")


def test_the_best_head_is_a_head_folder(tmp_path: Path, scripted: list[int]) -> None:
    monitor = RecordingMonitor()
    whole = run(tmp_path / "whole", monitor)
    best = load_config(tmp_path / "whole" / "best")
    assert (best.provenance["steps"], best.provenance["validation"]["walk_al"]) == (12, 1.9)
    assert scripted == [2, 4, 6, 8, 10, 12, 14]
    assert any("validation was better at step 12" in line for line in monitor.lines)
    assert whole.step == 14


def test_only_a_fall_by_one_percent_is_said(tmp_path: Path) -> None:
    lines: list[str] = []

    def validation(accepted: int) -> Validation:
        return Validation([0.5], [0.5], [1.0], Counters(1, drafts=100, accepted=accepted), None, [])

    best = BestHead(tmp_path, "key")
    head: Any = None
    for step, accepted in ((100, 50), (200, 80), (300, 79)):
        best.update(step, validation(accepted), lambda: head, write=False)
    assert (best.step, best.al) == (200, 1.8)
    best.compare(validation(79), lines.append)
    assert (lines, best.better) == ([], None)
    best.compare(validation(70), lines.append)
    assert lines[0].startswith("validation was better at step 200 (predicted AL 1.800, now 1.700)")
    assert best.better == {"step": 200, "predicted_al": 1.8}


@pytest.mark.parametrize("cut", [3, 8])
def test_a_resumed_training_keeps_the_same_best_head(
    tmp_path: Path, scripted: list[int], cut: int
) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(SystemExit):
        run(tmp_path / "cut", SignallingMonitor(15, cut))
    for _ in range(2):  # the second time as if the head had been lost
        resumed = run(tmp_path / "cut")
        assert (resumed.step, resumed.best.step, resumed.best.al) == (14, 12, 1.9)
    for name in ("metrics.jsonl", "best/best.json", "best/draftlab.json"):
        rows = [(tmp_path / run_ / name).read_text() for run_ in ("whole", "cut")]
        if name == "metrics.jsonl":
            rows = [[json.loads(line)["step"] for line in text.splitlines()] for text in rows]
        assert rows[0] == rows[1], name
    weights = [
        (tmp_path / run_ / "best/model.safetensors").read_bytes() for run_ in ("whole", "cut")
    ]
    assert weights[0] == weights[1]
    assert whole.step == 14


def test_the_best_head_has_the_weights_of_its_step(tmp_path: Path, scripted: list[int]) -> None:
    four = run(tmp_path / "four", steps=4, final_learning_rate=1.0)
    run(tmp_path / "six", steps=6, final_learning_rate=1.0)  # validations: 1.2, 1.5, 1.4
    head = loaded(tmp_path / "six" / "best")
    assert load_config(tmp_path / "six" / "best").provenance["steps"] == 4
    assert four.step == 4
    for name, tensor in four.head.tensors().items():
        if tensor.is_floating_point() and name not in four.head.shared_tensors():
            assert torch.equal(head.tensors()[name], tensor.bfloat16().to(tensor.dtype)), name


def test_the_best_head_of_another_training_is_not_read(tmp_path: Path, scripted: list[int]) -> None:
    key = run(tmp_path).key
    for other, step, found in ((key, 14, 12), (key, 11, 0), ("other", 14, 0)):
        best = BestHead(tmp_path / "best", other)
        best.resume(step)
        assert best.step == found


def test_an_export_of_a_head_that_got_worse_says_so(tmp_path: Path, scripted: list[int]) -> None:
    folder = copy_of_finished(tmp_path)
    for stage in ("head", "eval", "export"):
        shutil.rmtree(folder / "runs/small" / stage)
        (folder / f"runs/small/stages/{stage}.json").unlink()
    shutil.rmtree(folder / "runs/small/train")
    (folder / "runs/small").rename(folder / "runs/worse")  # it has answers and a store
    with contextlib.chdir(folder):
        settings = ["train.steps=14", "train.validate_every=2", "export.formats=[speculators]"]
        monitor = RecordingMonitor()
        recipe = load_recipe(Path("small.yaml"), ["name=worse", *settings])
        Pipeline(recipe, monitor).make("export")
        text = "\n".join(monitor.lines)
        assert "validation was better at step 12 (predicted AL 1.900, now 1.100)" in text
        assert "warning: this head is its training's last; the one after step 12 had a bet" in text
        assert (Path("runs/worse/train/best") / "draftlab.json").is_file()
