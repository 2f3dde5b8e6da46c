from __future__ import annotations

import contextlib
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab import Monitor, Pipeline, Report, evaluate_head, export_head, find_run, load_recipe
from draftlab.errors import UserError
from draftlab.pipeline import training
from draftlab.pipeline.run_folder import lock
from draftlab.store.store import Store
from draftlab.train.distributed.backends import TrainBackend
from tests.helpers.small_run import (
    Heard,
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
def workshop(tmp_path: Path) -> Iterator[Path]:
    """A copy of the finished workshop as working directory; nothing half-written stays in it."""
    folder = copy_of_finished(tmp_path / "workshop")
    with contextlib.chdir(folder):
        yield folder
    assert half_written(folder) == []


def pipeline(*overrides: str, monitor: Monitor | None = None) -> Pipeline:
    return Pipeline(load_recipe(Path("small.yaml"), overrides), monitor or Heard())


def fault(last: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        pipeline(*overrides).make(last)
    return caught.value


def given(path: Path, *conversations: list[str]) -> str:
    """Conversations of alternating user and assistant turns, used as they are."""
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


AS_GIVEN = "regenerate.enabled=false"


def test_the_verbs_are_functions_with_typed_results(workshop: Path, tmp_path: Path) -> None:
    done = pipeline()
    assert {s.state for s in done.plan("head", "eval", "export")} == {"done"}
    assert done.make("head") == Path("runs/small/head")
    settings = done.recipe.eval.model_copy(update={"temperatures": (0.0,), "max_prompts": 1})
    head = find_run(None) / "head"
    report = evaluate_head(done.recipe.target, head, settings, tmp_path / "out", monitor=Monitor())
    assert isinstance(report, Report)
    assert report == Report.read(tmp_path / "out" / "report.json")
    plain = evaluate_head(done.recipe.target, None, settings, tmp_path / "plain", monitor=Monitor())
    assert {row.drafter for row in plain.rows} == {"none"}
    out = export_head(head, done.recipe.target, tmp_path / "x", "speculators", monitor=Monitor())
    assert (out / "config.json").is_file()


@pytest.mark.parametrize(
    ("where", "unfinished"),
    [(("answers", 6), "answers"), (("train", 3), "head"), (("train", 6), "head")],
)
def test_interrupted_and_gone_on_with_ends_the_same(
    workshop: Path, where: tuple[str, int], unfinished: str
) -> None:
    interrupted = pipeline("name=other", monitor=Heard(interrupt=where))
    with pytest.raises(KeyboardInterrupt):
        interrupted.make("head")
    states = {s.stage.name: s.state for s in pipeline("name=other").plan("head")}
    assert states[unfinished] == "unfinished"
    heard = Heard()
    pipeline("name=other", monitor=heard).make("head")
    assert "resuming" in heard.text
    for artefact in ("head", "store", "answers.jsonl"):
        ours, theirs = Path("runs/other", artefact), Path("runs/small", artefact)
        if ours.is_dir():
            assert contents(ours) == contents(theirs)
        else:
            assert ours.read_bytes() == theirs.read_bytes()
    rows = [json.loads(x) for x in Path("runs/other/train/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 7))


def test_training_gives_its_memory_back(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes behind it, in this process or another one, has a target to load."""
    closed, left, give_back = [], [], training.free_memory
    monkeypatch.setattr(TrainBackend, "close", lambda self: closed.append(self.optimizer))

    def asked() -> None:
        closed[:] = map(weakref.ref, closed)
        give_back()
        left.extend(optimizer() for optimizer in closed)

    monkeypatch.setattr(training, "free_memory", asked)
    pipeline("name=again").make("head")
    assert left == [None]


def test_an_interrupted_run_does_not_take_other_settings(workshop: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        pipeline("name=other", monitor=Heard(interrupt=("train", 3))).make("head")
    assert (
        "train.clip: 0.5 in the run, 0.1 now" in fault("head", "name=other", "train.clip=0.1").what
    )
    # What changes nothing in the result may change: how often is logged and saved.
    pipeline("name=other", "train.checkpoint_every=1", "train.log_every=2").make("head")
    assert contents(Path("runs/other/head")) == contents(Path("runs/small/head"))


def test_a_store_that_was_deleted_is_not_recorded_for_nothing(workshop: Path) -> None:
    shutil.rmtree("runs/small/store")
    heard = Heard()
    pipeline(monitor=heard).make("head", "eval", "export")
    assert "store: not there, and not needed" in heard.text
    assert not Path("runs/small/store").exists()


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_a_damaged_shard_is_recorded_again(workshop: Path, damage: str) -> None:
    store, before = Path("runs/small/store"), contents(Path("runs/small/store"))
    shard = store / "shard-00001.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        shard.unlink()
    with pytest.raises(UserError, match="shard"):
        Store.open(store)
    heard = Heard()
    pipeline(monitor=heard).make("store")
    assert "shard-00001.safetensors" in heard.text
    assert "it is recorded again" in heard.text
    assert contents(store) == before


def test_a_shard_of_the_right_size_and_wrong_bytes_is_named(workshop: Path) -> None:
    shutil.rmtree("runs/small/head")
    shutil.rmtree("runs/small/train")
    shard = Path("runs/small/store/shard-00001.safetensors")
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    found = fault("head")
    assert "truncated or corrupt" in found.what
    assert shard.name in found.where
    shard.unlink()  # as it says
    pipeline().make("head")


def test_an_empty_data_set(workshop: Path) -> None:
    Path("empty.jsonl").write_text("")
    found = fault("head", "prompts.source=empty.jsonl", "name=other")
    assert "empty data set" in found.what
    assert "empty.jsonl" in found.where
    assert "empty data set" in fault("eval", "eval.suite=empty.jsonl").what


def test_a_broken_line_is_named(workshop: Path) -> None:
    write_prompts(Path("bad.jsonl"), ["a", "b"])
    with open("bad.jsonl", "a") as file:
        file.write('{"id": "x", "messages": [\n')
    assert fault("head", "prompts.source=bad.jsonl", "name=other").where == "bad.jsonl:3"


def test_conversations_without_an_answer_are_counted(workshop: Path) -> None:
    some = given(Path("some.jsonl"), ["hi", "the user use"], ["hi"], ["a", "the on"], ["in"])
    heard = Heard()
    pipeline(some, AS_GIVEN, "name=other", monitor=heard).make("store")
    assert "dropped 2 conversations without an assistant turn" in heard.text
    assert len(Store.open(Path("runs/other/store"))) == 2
    none = given(Path("none.jsonl"), ["hi"], ["a"])
    found = fault("store", none, AS_GIVEN, "name=third")
    assert "expected conversations with an assistant turn" in found.what
    assert "regenerate.enabled" in found.do
    assert not Path("runs/third/answers.jsonl").exists()


@pytest.mark.parametrize("what", ["truncate", "skip"])
def test_overlong_samples_are_cut_or_left_out_and_counted(workshop: Path, what: str) -> None:
    chats = [[f"hi {number}", "the user " * 12] for number in range(3)]
    long = given(Path("long.jsonl"), *chats, ["hi", "the on"])
    heard = Heard()
    limit = ("record.max_length=30", f"record.overlong={what}")
    pipeline(long, AS_GIVEN, "name=other", *limit, monitor=heard).make("store")
    manifest = Store.open(Path("runs/other/store")).manifest
    said = {"truncate": "3 of 4 samples truncated", "skip": "3 of 4 samples skipped"}[what]
    assert any(said in line for line in heard.lines), heard.lines
    if what == "truncate":
        assert (manifest.truncated, manifest.dropped.overlong, manifest.counts.records) == (3, 0, 4)
        assert sorted(Store.open(Path("runs/other/store")).lengths)[1:] == [30] * 3
    else:
        assert (manifest.truncated, manifest.dropped.overlong, manifest.counts.records) == (0, 3, 1)


def test_a_boundary_out_of_range_is_refused_before_any_work(workshop: Path) -> None:
    for boundaries in ("[1,2,5]", "[-1,2]", "[2,2]", "[3,1]", "[]"):
        found = fault("head", f"record.boundaries={boundaries}", "name=other")
        assert "boundaries" in found.what
        assert found.where == "record.boundaries"
    assert "0..4" in fault("head", "record.boundaries=[1,2,5]", "name=other").what
    assert not Path("runs/other").exists()
    pipeline("record.boundaries=[0,4]", "name=other").make("head")
    config = json.loads(Path("runs/other/head/draftlab.json").read_text())
    assert config["boundaries"] == [0, 4]


def test_a_head_to_start_from_is_looked_at_before_any_work(workshop: Path) -> None:
    wrong = ("name=other", "head.init=reference")
    found = fault("head", *wrong)
    assert "hidden_size: the new head has 32, this one" in found.what
    assert "\n  target: the new head is for" in found.what
    assert not Path("runs/other").exists()
    with pytest.raises(UserError) as caught:  # a plan may have nothing of the target but its config
        list(pipeline(*wrong).estimate("head"))
    assert "hidden_size: the new head has 32, this one" in caught.value.what
    assert "target: the new head" not in caught.value.what
    right = pipeline("name=other", "head.init=runs/small/head")
    assert list(right.estimate("head"))
    right.make("head")


def test_rows_too_short_for_a_record(workshop: Path) -> None:
    found = fault("head", "train.row_tokens=16", "name=other")
    assert "16" in str(found)
    assert "row_tokens" in str(found)


def test_a_target_without_a_chat_template(workshop: Path) -> None:
    toy_target_folder(Path("bare"), layers=4, hidden=32, chat_template=None)
    found = fault("head", "target=bare", "name=other")
    assert "chat template" in str(found)
    assert not Path("runs/other/answers.jsonl").exists()


def test_targets_that_are_missing_or_broken(workshop: Path) -> None:
    assert "config.json" in fault("head", "target=./nowhere", "name=other").what
    shutil.copytree("toy", "cut")
    weights = Path("cut/model.safetensors")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert "cut" in str(fault("head", "target=./cut", "name=other"))
    weights.unlink()
    assert "cut" in str(fault("head", "target=./cut", "name=other"))
    Path("cut/config.json").write_text("{")
    assert "config.json" in str(fault("head", "target=./cut", "name=other"))


def test_another_target_under_a_run_is_refused(workshop: Path) -> None:
    shutil.rmtree("toy")
    toy_target_folder(Path("toy"), layers=4, hidden=32, seed=1)
    found = fault("head")
    assert "target.fingerprint" in found.what
    recipe = load_recipe(Path("small.yaml"))
    before = snapshot(Path("runs"))
    for verb in (
        lambda: evaluate_head(
            recipe.target, find_run(None) / "head", recipe.eval, Path("out"), monitor=Monitor()
        ),
        lambda: export_head(
            find_run(None) / "head", recipe.target, Path("out"), "speculators", monitor=Monitor()
        ),
    ):
        with pytest.raises(UserError) as caught:
            verb()
        assert "target" in caught.value.what
        assert "trained for" in str(caught.value)
    assert snapshot(Path("runs")) == before
    assert not Path("out").exists()


def damaged(kind: str) -> None:
    path = Path("runs/small/head/model.safetensors")
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-10])
        return
    tensors = load_file(path)
    name = next(n for n, t in sorted(tensors.items()) if t.is_floating_point() and t.ndim == 2)
    if kind == "not finite":
        tensors[name][0, 0] = torch.nan
    elif kind == "missing":
        del tensors[name]
    else:
        tensors["stranger"] = torch.zeros(1, dtype=torch.bfloat16)
    save_file(tensors, path)


@pytest.mark.parametrize("kind", ["cut", "not finite", "missing", "unknown"])
def test_corrupt_head_weights(workshop: Path, kind: str) -> None:
    before = contents(Path("runs/small/head"))
    damaged(kind)
    for last, folder in (("eval", "eval"), ("export", "export")):
        shutil.rmtree(Path("runs/small", folder))
        found = fault(last)
        assert {"cut": "read"}.get(kind, kind) in found.what
        assert found.where.endswith("model.safetensors")
    Path("runs/small/head/model.safetensors").unlink()
    pipeline().make("head")  # from the last checkpoint, to the same bytes
    assert contents(Path("runs/small/head")) == before


def test_two_processes_in_one_run(workshop: Path) -> None:
    with lock(Path("runs/small")):
        found = fault("head")
        assert "another draftlab process" in found.what
        assert found.where.endswith("small")
    pipeline().make("head")


def test_a_new_workshop_is_as_the_first(tmp_path: Path) -> None:
    """The run is a function of recipe, target and prompts: not of its folder."""
    with contextlib.chdir(new_workshop(tmp_path / "again")):
        pipeline().make("head")
    ours, theirs = (folder / "runs/small" for folder in (tmp_path / "again", finished()))
    assert contents(ours / "head") == contents(theirs / "head")
    assert contents(ours / "store") == contents(theirs / "store")
