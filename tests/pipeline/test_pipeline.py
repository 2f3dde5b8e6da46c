from __future__ import annotations

import contextlib
import json
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftlab import Monitor, Pipeline, Report, evaluate_head, export_head, find_run, load_recipe
from draftlab.errors import UserError
from draftlab.pipeline import check_recipe, recording, target_worker, training
from draftlab.pipeline.run_folder import lock
from draftlab.store.store import Store
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.train.distributed.backends import TrainBackend
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import (
    InterruptingMonitor,
    contents,
    copy_of_finished,
    finished,
    half_written,
    new_workshop,
    snapshot,
    write_prompts,
)
from tests.helpers.toys import toy_target_folder


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Change into a copy of the finished run; check that no half-written files are left."""
    copy = copy_of_finished(tmp_path / "copy")
    with contextlib.chdir(copy):
        yield copy
    assert half_written(copy) == []


def pipeline(*overrides: str, monitor: Monitor | None = None) -> Pipeline:
    return Pipeline(load_recipe(Path("small.yaml"), overrides), monitor or Monitor())


def error_of(last: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        pipeline(*overrides).make(last)
    return caught.value


def write_conversations(path: Path, *conversations: list[str]) -> str:
    """Write conversations of alternating user and assistant turns; return the override for them."""
    lines = [
        {
            "id": f"c{i}",
            "messages": [
                {"role": ("user", "assistant")[n % 2], "content": text}
                for n, text in enumerate(texts)
            ],
        }
        for i, texts in enumerate(conversations)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"prompts.source={path.name}"


NO_REGENERATION = "regenerate.enabled=false"


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
    ("where", "unfinished"),
    [(("answers", 6), "answers"), (("train", 3), "head"), (("train", 6), "head")],
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
    monkeypatch.setattr(check_recipe, "find_python", lambda _: Path())
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
    module, function = (recording, "record") if stage == "store" else (training, "train_head")
    monkeypatch.setattr(module, function, stop)
    with pytest.raises(KeyboardInterrupt):
        run.make(stage)
    assert alive == [None]


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


def test_a_prompt_with_two_given_answers_is_answered_once(folder: Path) -> None:
    chats = ["def f(use):", "one"], ["def f(use):", "two"], ["def g(use):", "one"]
    source = write_conversations(folder / "twice.jsonl", *chats)
    for name, settings, count in (("own", (), 2), ("given", (NO_REGENERATION,), 3)):
        pipeline(f"name={name}", source, *settings).make("answers")
        assert len(Path(f"runs/{name}/answers.jsonl").read_text().splitlines()) == count


def test_conversations_without_an_answer_are_counted(folder: Path) -> None:
    some = write_conversations(
        Path("some.jsonl"), ["hi", "the user use"], ["hi"], ["a", "the on"], ["in"]
    )
    monitor = RecordingMonitor()
    pipeline(some, NO_REGENERATION, "name=other", monitor=monitor).make("store")
    assert "dropped 2 conversations without an assistant turn" in monitor.text
    assert len(Store.open(Path("runs/other/store"))) == 2


@pytest.mark.parametrize("what", ["truncate", "skip"])
def test_overlong_samples_are_cut_or_left_out_and_counted(folder: Path, what: str) -> None:
    chats = [[f"hi {number}", "the user " * 12] for number in range(3)]
    long = write_conversations(Path("long.jsonl"), *chats, ["hi", "the on"])
    monitor = RecordingMonitor()
    limit = ("record.max_length=30", f"record.overlong={what}")
    pipeline(long, NO_REGENERATION, "name=other", *limit, monitor=monitor).make("store")
    manifest = Store.open(Path("runs/other/store")).manifest
    count = {"truncate": "3 of 4 samples truncated", "skip": "3 of 4 samples skipped"}[what]
    assert any(count in line for line in monitor.lines), monitor.lines
    if what == "truncate":
        assert (manifest.truncated, manifest.dropped.overlong, manifest.counts.records) == (3, 0, 4)
        assert sorted(Store.open(Path("runs/other/store")).lengths)[1:] == [30] * 3
    else:
        assert (manifest.truncated, manifest.dropped.overlong, manifest.counts.records) == (0, 3, 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["prompts.source=empty.jsonl"], ["empty data set", "empty.jsonl"]),
        (["prompts.source=bad.jsonl"], ["bad.jsonl:3"]),
        (
            ["prompts.source=prompts.jsonl", NO_REGENERATION],
            ["expected conversations with an assistant turn", "regenerate.enabled"],
        ),
        *(
            ([f"record.boundaries={boundaries}"], ["boundaries", "record.boundaries"])
            for boundaries in ("[-1,2]", "[2,2]", "[3,1]", "[]")
        ),
        (["record.boundaries=[1,2,5]"], ["boundaries", "0..4", "record.boundaries"]),
        (["target=bare"], ["chat template"]),
        (["target=./nowhere"], ["config.json"]),
        (["target=./cut"], ["cut"]),
        (["target=./unweighted"], ["unweighted"]),
        (["target=./broken"], ["config.json"]),
    ],
    ids=str,
)
def test_mistakes_are_refused_before_any_answer(
    folder: Path, overrides: list[str], words: list[str]
) -> None:
    Path("empty.jsonl").write_text("")
    write_prompts(Path("bad.jsonl"), ["a", "b"])
    with open("bad.jsonl", "a") as file:
        file.write('{"id": "x", "messages": [\n')
    toy_target_folder(Path("bare"), layers=4, hidden=32, chat_template=None)
    for name in ("cut", "unweighted", "broken"):
        shutil.copytree("toy", name)
    weights = Path("cut/model.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    Path("unweighted/model.safetensors").unlink()
    Path("broken/config.json").write_text("{")
    error = str(error_of("head", *overrides, "name=other"))
    assert [word for word in words if word not in error] == []
    assert not Path("runs/other/answers.jsonl").exists()


def test_mistakes_that_show_later_are_refused(folder: Path) -> None:
    Path("empty.jsonl").write_text("")
    assert "empty data set" in error_of("eval", "eval.suite=empty.jsonl").what
    error = str(error_of("head", "train.row_tokens=16", "name=other"))
    assert "16" in error
    assert "row_tokens" in error


def test_the_first_and_the_last_boundary_can_be_recorded(folder: Path) -> None:
    pipeline("record.boundaries=[0,4]", "name=other").make("head")
    config = json.loads(Path("runs/other/head/draftlab.json").read_text())
    assert config["boundaries"] == [0, 4]


def test_head_init_is_checked_before_any_work(folder: Path) -> None:
    wrong = ("name=other", "head.init=reference")
    error = error_of("head", *wrong)
    assert "hidden_size: the new head has 32, this one" in error.what
    assert "\n  tokenizer: the new head's target, toy, has" in error.what
    assert not Path("runs/other").exists()
    with pytest.raises(UserError) as caught:  # a plan may have only the target's config
        list(pipeline(*wrong).estimate("head"))
    assert "hidden_size: the new head has 32, this one" in caught.value.what
    assert "tokenizer: the new head" not in caught.value.what
    right = pipeline("name=other", "head.init=runs/small/head")
    assert list(right.estimate("head"))
    right.make("head")


def test_a_head_starts_from_one_of_an_older_target(folder: Path) -> None:
    """The newer target has other weights, and the same shape and tokenizer."""
    toy_target_folder(Path("newer"), layers=4, hidden=32, seed=1)
    monitor = RecordingMonitor()
    warm = ("name=newer", "target=newer", "head.init=runs/small/head", "train.steps=1")
    pipeline(*warm, "train.learning_rate=1e-9", monitor=monitor).make("head")
    old, new = (
        json.loads(Path(f"runs/{n}/head/draftlab.json").read_text()) for n in ("small", "newer")
    )
    older = old["target"]["fingerprint"]
    assert new["target"]["fingerprint"] != older
    assert new["provenance"]["initial_head"]["target"] == old["target"]
    line = next(line for line in monitor.lines if line.startswith("starts from"))
    assert f"(eagle3, 1 layer) of another target, toy ({older[:12]}), with" in line
    weights = [load_file(f"runs/{name}/head/model.safetensors") for name in ("small", "newer")]
    assert torch.equal(weights[0]["fc.weight"], weights[1]["fc.weight"])


def head_flag(*overrides: str) -> bool:
    config = pipeline("name=new", "head.family=eagle3", *overrides)
    return bool(config.recipe.head.norm_before_residual)


def test_norm_before_residual_is_on_where_it_raises_al_and_can_be_served(folder: Path) -> None:
    """The value stands in the recipe of the run; the plan says why it is what it is."""
    assert head_flag()
    assert head_flag("export.formats=[speculators,vllm,llamacpp]")
    assert not head_flag("export.formats=[vllm,sglang]")
    assert head_flag("export.formats=[sglang]", "head.norm_before_residual=true")
    assert not head_flag("head.norm_before_residual=false")
    for family in ("peagle", "eagle", "eagle_llama4", "dspark"):
        assert not head_flag(f"head.family={family}"), family
    lines = list(
        pipeline("name=new", "export.formats=[sglang]", "record.boundaries=[1,2,3]").estimate(
            "head"
        )
    )
    assert "head.norm_before_residual: false, which sglang needs" in lines[-1]
    assert "SGLang cannot serve" in list(pipeline("name=new").estimate("head"))[-1]
    explicit = pipeline("name=new", "head.norm_before_residual=true").estimate("head")
    assert not any("norm_before_residual" in line for line in explicit)


def test_norm_before_residual_is_that_of_the_head_that_it_starts_from(folder: Path) -> None:
    old = pipeline("name=old", "head.norm_before_residual=false")
    shutil.copytree("runs/small", "runs/old")
    old.make("head", force=True)
    assert not head_flag("head.init=runs/old/head", "export.formats=[vllm]")
    assert head_flag("head.init=runs/small/head", "export.formats=[vllm,sglang]")


def test_a_training_that_began_with_another_default_goes_on_with_it(folder: Path) -> None:
    record = Path("runs/small/stages/head.json")
    stage = json.loads(record.read_text())
    assert stage["inputs"]["head.norm_before_residual"] is True
    for value in (False, None):  # None: a record of a version without the setting
        stage["inputs"].pop("head.norm_before_residual")
        if value is not None:
            stage["inputs"]["head.norm_before_residual"] = value
        record.write_text(json.dumps(stage))
        monitor = RecordingMonitor()
        pipeline(monitor=monitor).make("head")
        assert any(line.startswith("head: there") for line in monitor.lines)
        stage["inputs"]["head.norm_before_residual"] = value or False
    for name in ("head", "train"):
        shutil.rmtree(f"runs/small/{name}")
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make("head")
    assert "head.norm_before_residual: false, as this run's training began" in monitor.lines


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


def test_corrupt_head_weights(folder: Path) -> None:
    """Faults of single tensors are those of tests/heads/test_head_folder.py."""
    before, weights = contents(Path("runs/small/head")), Path("runs/small/head/model.safetensors")
    os.truncate(weights, weights.stat().st_size - 10)
    record = Path("runs/small/stages/head.json")
    fields = json.loads(record.read_text())
    del fields["sha256"]  # as older versions wrote it; with it the head is made again
    record.write_text(json.dumps(fields))
    for last in ("eval", "export"):
        shutil.rmtree(Path("runs/small", last))
        error = error_of(last)
        assert "read" in error.what
        assert error.where.endswith("model.safetensors")
    weights.unlink()
    pipeline().make("head")  # from the last checkpoint, to the same bytes
    assert contents(Path("runs/small/head")) == before


def test_two_processes_in_one_run(folder: Path) -> None:
    with lock(Path("runs/small")):
        error = error_of("head")
        assert "another draftlab process" in error.what
        assert error.where.endswith("small")
    pipeline().make("head")


def test_a_run_is_independent_of_its_folder(tmp_path: Path) -> None:
    with contextlib.chdir(new_workshop(tmp_path / "again")):
        pipeline().make("head")
    again, first = (folder / "runs/small" for folder in (tmp_path / "again", finished()))
    assert contents(again / "head") == contents(first / "head")
    assert contents(again / "store") == contents(first / "store")
