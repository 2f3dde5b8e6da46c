"""Stages of a run: the Python API, interruptions, memory, and artefacts that were changed."""

from __future__ import annotations

import json
import shutil
import weakref
from array import array
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from draftlab import Monitor, Report, evaluate_head, export_head, find_run, load_recipe
from draftlab.engine.engine import Engine
from draftlab.errors import UserError
from draftlab.pipeline import recording, training
from draftlab.plan import preflight
from draftlab.run.folder import lock
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.text import decode
from draftlab.text.answer_rounds import Draft
from draftlab.text.conversations import Conversation
from draftlab.train.distributed.backends import TrainBackend
from draftlab.workers import target_worker
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import (
    InterruptingMonitor,
    contents,
    error_of,
    pipeline,
    snapshot,
)
from tests.helpers.toys import toy_target_folder


def test_the_python_api(folder: Path, tmp_path: Path) -> None:
    finished_run = pipeline()
    assert {s.state for s in finished_run.plan("head", "eval", "export")} == {"done"}
    assert finished_run.make("head") == Path("runs/small/head")
    settings = finished_run.recipe.eval.model_copy(
        update={"temperatures": (0.0,), "max_prompts": 1}
    )
    head = find_run(None) / "head"
    report = evaluate_head(
        finished_run.recipe.target, head, settings, tmp_path / "out", monitor=Monitor()
    )
    assert isinstance(report, Report)
    assert report == Report.read(tmp_path / "out" / "report.json")
    plain = evaluate_head(
        finished_run.recipe.target, None, settings, tmp_path / "plain", monitor=Monitor()
    )
    assert {row.drafter for row in plain.rows} == {"none"}
    out = export_head(
        head, finished_run.recipe.target, tmp_path / "x", "speculators", monitor=Monitor()
    )
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(
    ("where", "unfinished"), [(("answers", 6), "answers"), (("train", 3), "head")]
)
def test_an_interrupted_run_continues_to_the_same_result(
    folder: Path, where: tuple[str, int], unfinished: str
) -> None:
    interrupted = pipeline("name=other", monitor=InterruptingMonitor(*where))
    with pytest.raises(KeyboardInterrupt):
        interrupted.make("head")
    states = {s.stage.name: s.state for s in pipeline("name=other").plan("head")}
    assert states[unfinished] == "unfinished"
    monitor = RecordingMonitor()
    pipeline("name=other", monitor=monitor).make("head")
    assert "resuming" in monitor.text
    for artefact in ("head", "store", "answers.jsonl"):
        continued, expected = Path("runs/other", artefact), Path("runs/small", artefact)
        if continued.is_dir():
            assert contents(continued) == contents(expected)
        else:
            assert continued.read_bytes() == expected.read_bytes()
    rows = [json.loads(x) for x in Path("runs/other/train/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 7))


def test_training_frees_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next stage, in this process or another one, loads a target."""
    closed, alive, free_memory = [], [], training.free_memory
    monkeypatch.setattr(TrainBackend, "close", lambda self: closed.append(self.optimizer))

    def free_and_record() -> None:
        closed[:] = map(weakref.ref, closed)
        free_memory()
        alive.extend(optimizer() for optimizer in closed)

    monkeypatch.setattr(training, "free_memory", free_and_record)
    pipeline("name=again").make("head")
    assert alive == [None]


@pytest.mark.parametrize("stage", ["store", "head"])
def test_the_target_is_freed_where_others_need_the_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Training, and vLLM that records, come after a stage that has loaded the target."""
    monkeypatch.setattr(preflight, "find_python", Path)
    settings = ["record.backend=vllm"] if stage == "store" else []
    run = pipeline("name=freed", *settings)
    models, alive, load_target = [], [], target_worker.load_target

    def load(settings: TargetSettings) -> Target:
        target = load_target(settings)
        models.append(weakref.ref(target.model))
        return target

    def stop(*_: object, **__: object) -> None:
        alive.extend(model() for model in models)
        raise KeyboardInterrupt

    monkeypatch.setattr(target_worker, "load_target", load)
    module, function = (recording, "record") if stage == "store" else (training, "_train")
    monkeypatch.setattr(module, function, stop)
    with pytest.raises(KeyboardInterrupt):
        run.make(stage)
    assert alive == [None]


def test_a_target_that_fits_beside_the_training_is_loaded_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, load_target = [], target_worker.load_target
    monkeypatch.setattr(target_worker, "load_target", lambda s: loads.append(s) or load_target(s))
    monkeypatch.setattr(recording.Recording, "_fits_beside_training", lambda _: True)
    kept = pipeline("name=kept", monitor=(monitor := RecordingMonitor()))
    kept.make("eval")
    assert len(loads) == 1
    assert "the target stays on the GPU for the evaluation" in monitor.text
    pipeline().make("eval")
    reports = [Report.read(Path("runs", name, "eval", "report.json")) for name in ("kept", "small")]
    counted = [[(r.temperature, r.k, r.drafts, r.accepted) for r in one.rows] for one in reports]
    assert counted[0] == counted[1]


@pytest.mark.parametrize(
    ("free", "gpus", "fits"), [(2**31, 1, True), (2**21, 1, False), (2**31, 2, False)]
)
def test_a_target_stays_where_a_training_has_twice_its_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, free: int, gpus: int, fits: bool
) -> None:
    made = pipeline().recording
    assert not made._fits_beside_training()  # none is loaded
    made.target = SimpleNamespace(device=torch.device("cpu"))
    assert not made._fits_beside_training()
    made.target = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 2**40))
    target = made.recipe.target.model_copy(update={"gpus": gpus})
    made.recipe = made.recipe.model_copy(update={"target": target})
    assert made._fits_beside_training() == fits


def test_a_worker_that_has_answered_frees_the_target_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "find_python", Path)
    recipe = pipeline("name=freed", "record.backend=vllm").recipe
    worker = target_worker.TargetWorker(recipe, folder, Monitor())
    turns = [{"role": "user", "content": "a"}]
    conversation = Conversation("a", turns, "s")
    (draft,) = worker.answer([Draft(conversation, 0.0, [turns], array("i", [5, 6]))])
    assert draft.answers
    model = weakref.ref(worker.target.model)
    worker.finish()
    assert isinstance(worker.recorded_target, TargetMetadata)
    assert model() is None


def test_answers_free_their_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV cache takes most of a GPU's memory."""
    engines, alive, new_engine = [], [], decode.answer_engine
    free_memory = target_worker.free_memory

    def build(*arguments: object) -> Engine:
        engine = new_engine(*arguments)
        engine.itself = engine  # a GPU's graphs are such cycles
        engines.append(weakref.ref(engine))
        return engine

    def free_and_record() -> None:
        free_memory()
        alive.extend(engine() for engine in engines)

    monkeypatch.setattr(decode, "answer_engine", build)
    monkeypatch.setattr(target_worker, "free_memory", free_and_record)
    pipeline("name=freed").make("store")
    assert alive
    assert set(alive) == {None}


def test_an_interrupted_run_refuses_other_settings(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pipeline("name=other", monitor=InterruptingMonitor("train", 3)).make("head")
    assert (
        "train.clip: 0.5 in the run, 0.1 now"
        in error_of("head", "name=other", "train.clip=0.1").what
    )
    # Settings without effect on the result may change.
    pipeline("name=other", "train.checkpoint_every=1", "train.log_every=2").make("head")
    assert contents(Path("runs/other/head")) == contents(Path("runs/small/head"))


def test_a_deleted_store_that_nothing_needs_is_not_recorded_again(folder: Path) -> None:
    shutil.rmtree("runs/small/store")
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make("head", "eval", "export")
    assert "store: not there, and not needed" in monitor.text
    assert not Path("runs/small/store").exists()


def test_another_target_under_a_run_is_refused(folder: Path) -> None:
    shutil.rmtree("toy")
    toy_target_folder(Path("toy"), layers=4, hidden=32, seed=1)
    error = error_of("head")
    assert "target.fingerprint" in error.what
    recipe = load_recipe(Path("small.yaml"))
    before = snapshot(Path("runs"))
    for function in (
        lambda: evaluate_head(
            recipe.target, find_run(None) / "head", recipe.eval, Path("out"), monitor=Monitor()
        ),
        lambda: export_head(
            find_run(None) / "head", recipe.target, Path("out"), "speculators", monitor=Monitor()
        ),
    ):
        with pytest.raises(UserError) as caught:
            function()
        assert "target" in caught.value.what
        assert "trained for" in str(caught.value)
    assert snapshot(Path("runs")) == before
    assert not Path("out").exists()


def test_two_processes_in_one_run(folder: Path) -> None:
    with lock(Path("runs/small")):
        error = error_of("head")
        assert "another draftlab process" in error.what
        assert error.where.endswith("small")
    pipeline().make("head")
