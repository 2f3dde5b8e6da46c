"""Metrics reach Weights & Biases and TensorBoard; a resumed training continues its run."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.recipe.recipe import load_recipe
from draftlab.train.loop import Trainer
from draftlab.train.metrics import check_trackers
from draftlab.train.settings import TrainSettings
from tests.helpers.list_store import ListStore
from tests.helpers.small_run import InterruptingMonitor, copy_of_finished, draftlab
from tests.helpers.toy_training import orthogonal_parts, toy_answer, trained

STUB = """\
inits, logs, ends = [], [], []


class Run:
    def log(self, numbers, step):
        logs.append((step, numbers))

    def finish(self, exit_code=None):
        ends.append(exit_code)


def init(**options):
    inits.append(options)
    return Run()
"""


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that stands in for wandb."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub/wandb.py").write_text(STUB)
    monkeypatch.syspath_prepend(tmp_path / "stub")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield importlib.import_module("wandb")
    del sys.modules["wandb"]


def train(folder: Path, monitor: Any = None, **settings: Any) -> Trainer:
    """Train on 12 answers, with a checkpoint after every second step."""
    target = orthogonal_parts()
    store = ListStore([toy_answer(target, i) for i in range(12)])
    fields = {"steps": 6, "checkpoint_every": 2, "log_every": 1} | settings
    return trained(folder, store, target, monitor, **fields)


def test_a_resumed_training_continues_its_run(tmp_path: Path, wandb: Any) -> None:
    folder = tmp_path / "name/train"
    with pytest.raises(KeyboardInterrupt):
        train(folder, InterruptingMonitor("train", 5), wandb="project")
    assert wandb.ends == [130]
    train(folder, wandb="project")
    assert wandb.ends == [130, 0]
    first, second = wandb.inits
    assert first == second
    assert first["resume"] == "allow"
    assert (first["project"], first["name"], len(first["id"])) == ("project", "name", 16)
    assert [step for step, row in wandb.logs if "loss/0" in row] == [1, 2, 3, 4, 5, 5, 6]
    numbers = wandb.logs[-1][1]
    assert numbers.keys() >= {"validation/alpha/0", "validation/by_position/0/rows/2"}
    assert all(isinstance(value, int | float) for value in numbers.values())
    train(tmp_path / "other/train", wandb="project")
    train(folder.with_name("again"), wandb="project", learning_rate=1e-3)
    assert len({options["id"] for options in wandb.inits}) == 3  # another name; another key


def test_an_error_ends_the_run_with_a_code(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, code in ((ZeroDivisionError(), 1), (SystemExit(143), 143)):

        def fail(*_: object, error: BaseException = error) -> None:
            raise error

        monkeypatch.setattr(Trainer, "_accumulate", fail)
        with pytest.raises(type(error)):
            train(tmp_path / "train", wandb="project")
        assert wandb.ends[-1] == code


def test_the_config_is_the_recipe_and_its_data(tmp_path: Path, wandb: Any) -> None:
    workshop = copy_of_finished(tmp_path / "w")
    settings = ["train.wandb=project", "train.steps=1"]
    result = draftlab(workshop, "train", "small.yaml", *settings, "--force")
    assert result.exit_code == 0, result.output
    (options,) = wandb.inits
    default = "head.norm_before_residual=true"
    recipe = load_recipe(workshop / "small.yaml", [*settings, default])
    expected = json.loads(recipe.model_dump_json())
    assert {name: options["config"][name] for name in expected} == expected
    assert options["config"]["target"]["path"] == "toy"
    assert options["config"]["data"]["records"] == 12
    assert options["dir"] == "runs/small/train"


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftlab.train.metrics.find_spec", lambda name: None)
    check_trackers(TrainSettings())
    for settings, name in (({"wandb": "p"}, "wandb"), ({"tensorboard": True}, "tensorboard")):
        with pytest.raises(UserError, match=f"{name} is not installed") as caught:
            check_trackers(TrainSettings(**settings))
        assert caught.value.where == f"train.{name}"
        assert caught.value.do == f"pip install {name}"


def test_wandb_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "name/train"
    with pytest.raises(KeyboardInterrupt):
        train(folder, InterruptingMonitor("train", 5), wandb="project")
    train(folder, wandb="project")
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    assert len(runs) in (1, 2)  # two that began in one second share a folder
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1  # one id
    assert all(list(run.glob("*.wandb")) for run in runs)


def test_tensorboard_itself(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "name/train"
    with pytest.raises(KeyboardInterrupt):
        train(folder, InterruptingMonitor("train", 5), tensorboard=True)
    train(folder, tensorboard=True)
    events = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    expected = [(row["step"], row["loss"][0]) for row in rows if "loss" in row]
    found = [(event.step, event.value) for event in events.Scalars("loss/0")]
    assert [step for step, _ in found] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected])
