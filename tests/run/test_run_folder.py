from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.recipe.recipe import Recipe, flatten, parse_recipe
from draftlab.run import stage_status
from draftlab.run.folder import find_run, write_recipe
from draftlab.run.stage_status import Run
from draftlab.run.stages import STAGES, record_path, recorded_with

ANSWERS, HEAD, EVAL, EXPORT = (STAGES[n] for n in ("answers", "head", "eval", "export"))
FILES = {"answers": {"prompts.sha256": "1"}, "eval": {"eval.suite.sha256": "2"}}


@pytest.fixture(autouse=True)
def _stores_are_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_status, "check_store", lambda *_: False)


def make_run(folder: Path, files: dict | None = None, **tree: object) -> Run:
    recipe = parse_recipe({"name": "x", **tree})
    return Run(folder, flatten(recipe), files or FILES)


def finish_stages(run: Run, *names: str) -> Run:
    """Finish stages of a run, all by default."""
    for name in names or STAGES:
        with run.recorded_stage(STAGES[name]) as artefact:
            if STAGES[name].files or name == "export":
                artefact.mkdir(exist_ok=True)
                for file in STAGES[name].files:
                    (artefact / file).write_text("{}")
            else:
                artefact.write_text("{}")
    return run


def states(run: Run, *last: str) -> dict[str, str]:
    return {s.stage.name: s.state for s in run.plan(*(last or ("head", "eval", "export")))}


def test_stages_are_missing_then_done(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert set(states(run).values()) == {"missing"}
    assert list(states(run, "store")) == ["answers", "store"]
    assert set(states(finish_stages(run)).values()) == {"done"}


def test_a_stage_that_was_interrupted_is_unfinished(tmp_path: Path) -> None:
    run = finish_stages(make_run(tmp_path), "answers")
    store = tmp_path / "store"
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt), run.recorded_stage(STAGES["store"]):
        raise KeyboardInterrupt
    assert states(run, "head") == {"answers": "done", "store": "unfinished", "head": "missing"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_failed_before_it_wrote_anything_has_no_record(
    tmp_path: Path, name: str
) -> None:
    """The corrected setting must not be refused as a change."""
    run, stage = make_run(tmp_path), STAGES[name]
    with pytest.raises(UserError, match="wrong"), run.recorded_stage(stage):
        raise UserError("wrong")
    assert not record_path(tmp_path, stage).exists()
    file = {"answers": "answers.index/0", "head": "train/metrics.jsonl"}.get(name)
    path = tmp_path / (file or f"{stage.artefact}/file")
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(UserError, match="wrong"), run.recorded_stage(stage):
        raise UserError("wrong")
    assert read_json(record_path(tmp_path, stage), kind="record")["complete"] is False


@pytest.mark.parametrize("stage", ["store", "head", "eval"])
def test_a_stage_without_one_of_its_files_is_unfinished(
    tmp_path: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = finish_stages(make_run(tmp_path))

    def broken(folder: Path, *_: object) -> None:
        raise UserError("a shard of the store is missing", where=folder)

    if stage == "store":
        monkeypatch.setattr(stage_status, "check_store", broken)
    else:
        (tmp_path / STAGES[stage].artefact / STAGES[stage].files[-1]).unlink()
    assert states(run, stage)[stage] == "unfinished"


# The stages that each setting changes.
ALL = ["answers", "store", "head", "eval", "export"]


@pytest.mark.parametrize(
    ("tree", "changed"),
    [
        ({"seed": 1}, ALL),
        ({"target": {"dtype": "bfloat16"}}, ALL),
        ({"prompts": {"max_prompts": 3}}, ALL),
        ({"regenerate": {"top_p": 0.9}}, ALL),
        ({"record": {"dtype": "float32"}}, ALL[1:]),
        ({"draft_vocab": {"size": 7}}, ALL[2:]),
        ({"head": {"head_dim": 8}}, ALL[2:]),
        ({"train": {"steps": 5}}, ALL[2:]),
        ({"eval": {"k": 1}}, ["eval", "export"]),
        ({"export": {"k": 1}}, ["export"]),
        ({"train": {"device": "cpu", "log_every": 3, "checkpoint_every": 9, "wandb": "w"}}, []),
        ({"train": {"micro_rows": 1, "anchor_parts": 2}}, []),
        ({"target": {"device": "cpu"}}, []),
        ({"name": "y"}, []),
    ],
)
def test_a_setting_changes_its_stage_and_what_follows(
    tmp_path: Path, tree: dict, changed: list
) -> None:
    finish_stages(make_run(tmp_path))
    current = states(make_run(tmp_path, **tree))
    assert [name for name, state in current.items() if state == "changed"] == changed
    assert {state for name, state in current.items() if name not in changed} <= {"done"}


def test_every_setting_belongs_to_a_stage() -> None:
    prefixes = {prefix for stage in STAGES.values() for prefix in stage.settings}
    assert set(Recipe.model_fields) - prefixes == {"name", "hardware"}  # the last is for --plan


def test_stages_that_nothing_needs_do_not_run_again(tmp_path: Path) -> None:
    run = finish_stages(make_run(tmp_path))
    (tmp_path / "store" / "manifest.json").unlink()
    (tmp_path / "answers.jsonl").unlink()
    assert states(run, "head") == {"answers": "unneeded", "store": "unneeded", "head": "done"}
    assert states(run, "store") == {"answers": "missing", "store": "unfinished"}
    (tmp_path / "head" / "draftlab.json").unlink()
    assert states(run, "eval") == {
        "answers": "unneeded",
        "store": "unneeded",
        "head": "unneeded",
        "eval": "done",
    }
    assert states(run, "head", "eval") == {
        "answers": "missing",
        "store": "unfinished",
        "head": "unfinished",
        "eval": "done",
    }


def test_remove_deletes_later_stages_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = finish_stages(make_run(tmp_path))
    (tmp_path / "train").mkdir()
    (tmp_path / "answers.partial.jsonl").write_text("")
    removed: list[str] = []
    unlink = Path.unlink

    def unlink_and_record(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "stages":
            removed.append(path.stem)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_and_record)
    run.remove(STAGES["store"])
    assert removed == ["export", "eval", "head", "store"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "answers.jsonl",
        "answers.partial.jsonl",
        "stages",
    ]
    run.remove(ANSWERS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stages"]


def test_removing_answers_keeps_files_of_the_user(tmp_path: Path) -> None:
    run = finish_stages(make_run(tmp_path), "answers")
    own = {"answers-backup.jsonl", "answers.jsonl.bak", "answers.txt", ".answers.tmp"}
    written = ["answers.json", "answers.partial.jsonl", ".answers.json.7.tmp"]
    for name in (*own, *written):
        (tmp_path / name).write_text("")
    for name in ("answers.index", ".answers.index.tmp"):
        (tmp_path / name).mkdir()
    run.remove(ANSWERS)
    assert {path.name for path in tmp_path.iterdir()} == {*own, "stages"}


def test_removing_a_link_keeps_its_target(tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("")
    run = finish_stages(make_run(tmp_path / "run"), "answers")
    (tmp_path / "run" / "store").symlink_to(elsewhere)
    run.remove(STAGES["store"])
    assert (elsewhere / "file").exists()
    assert not (tmp_path / "run" / "store").exists()


def test_a_stage_with_other_settings_is_recorded(tmp_path: Path) -> None:
    run = finish_stages(make_run(tmp_path))
    settings = flatten(parse_recipe({"name": "x"}).eval, "eval.") | FILES["eval"]
    with recorded_with(tmp_path, EVAL, settings | {"target.device": "cpu"}):
        pass
    assert run.status(EVAL).state == "done"  # target.device has no effect on results
    with recorded_with(tmp_path, EVAL, settings | {"eval.k": 3}):
        pass
    assert run.status(EVAL).changes == {"eval.k": (3, None)}
    assert run.status(EXPORT).state == "done"


def test_latest_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run yet"):
        find_run(None)
    with pytest.raises(UserError, match="expected a run, found none"):
        find_run("a")
    for name in ("a", "b"):
        run = make_run(Path("runs") / name)
        write_recipe(run.folder, "seed: 1")
        assert find_run(None).name == name
    before = {p: p.lstat().st_mtime_ns for p in Path("runs").rglob("*")}
    write_recipe(run.folder, "seed: 1")
    assert {p: p.lstat().st_mtime_ns for p in Path("runs").rglob("*")} == before
    write_recipe(run.folder, "seed: 2")
    assert Path("runs/b/recipe.yaml").read_text() == "seed: 2"
    assert find_run("a") == find_run("runs/a") == tmp_path / "runs" / "a"
    assert not [p for p in Path("runs").iterdir() if p.name.startswith(".")]
