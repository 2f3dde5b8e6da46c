from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.files import read_json
from draftlab.pipeline import run_folder as run_module
from draftlab.pipeline.recipe import Recipe, flatten, parse_recipe
from draftlab.pipeline.run_folder import Run, book, find_run, git_commit, lock, making_otherwise
from draftlab.pipeline.stages import STAGES

ANSWERS, HEAD, EVAL, EXPORT = (STAGES[n] for n in ("answers", "head", "eval", "export"))
FILES = {"answers": {"prompts.sha256": "1"}, "eval": {"eval.suite.sha256": "2"}}


@pytest.fixture(autouse=True)
def _stores_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "check_store", lambda folder: None)


def make_run(folder: Path, files: dict | None = None, **tree: object) -> Run:
    recipe = parse_recipe({"name": "x", **tree})
    return Run(folder, flatten(recipe), files or FILES)


def made(run: Run, *names: str) -> Run:
    """A run whose stages (all by default) were made."""
    for name in names or STAGES:
        with run.making(STAGES[name]) as artefact:
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
    assert set(states(made(run)).values()) == {"done"}


def test_what_is_being_made_when_a_process_dies_is_unfinished(tmp_path: Path) -> None:
    run = made(make_run(tmp_path), "answers")
    store = tmp_path / "store"
    store.mkdir()
    (store / "manifest.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt), run.making(STAGES["store"]):
        raise KeyboardInterrupt
    assert states(run, "head") == {"answers": "done", "store": "unfinished", "head": "missing"}


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_refused_before_it_made_anything_is_as_if_not_begun(
    tmp_path: Path, name: str
) -> None:
    """A wrong setting that stopped it must not stand in the way of the right one."""
    run, stage = make_run(tmp_path), STAGES[name]
    with pytest.raises(UserError, match="wrong"), run.making(stage):
        raise UserError("wrong")
    assert not book(tmp_path, stage).exists()
    begun = {"answers": "answers.parts/0", "head": "train/metrics.jsonl"}.get(name)
    begun = tmp_path / (begun or f"{stage.artefact}/begun")
    begun.parent.mkdir(parents=True)
    begun.write_text("")
    with pytest.raises(UserError, match="wrong"), run.making(stage):
        raise UserError("wrong")
    assert read_json(book(tmp_path, stage), kind="record")["complete"] is False


@pytest.mark.parametrize("stage", ["store", "head", "eval"])
def test_a_stage_that_lost_a_file_is_not_whole(tmp_path: Path, stage: str) -> None:
    run = made(make_run(tmp_path))
    (tmp_path / STAGES[stage].artefact / STAGES[stage].files[-1]).unlink()
    assert states(run, stage)[stage] == "unfinished"


def test_a_cut_store_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(make_run(tmp_path))

    def broken(folder: Path) -> None:
        raise UserError("a shard of the store is missing", where=folder)

    monkeypatch.setattr(run_module, "check_store", broken)
    assert states(run, "store")["store"] == "unfinished"


# What each setting makes old, itself and all that is made of it.
ALL = ["answers", "store", "head", "eval", "export"]


@pytest.mark.parametrize(
    ("tree", "old"),
    [
        ({"seed": 1}, ALL),
        ({"target": {"dtype": "bfloat16"}}, ALL),
        ({"prompts": {"max_prompts": 3}}, ALL),
        ({"regenerate": {"top_p": 0.9}}, ALL),
        ({"record": {"dtype": "float32"}}, ALL[1:]),
        ({"draft_vocab": {"size": 7}}, ALL[2:]),
        ({"head": {"head_dim": 8}}, ALL[2:]),
        ({"train": {"steps": 5}}, ALL[2:]),
        ({"eval": {"k": 1}}, ["eval"]),
        ({"export": {"k": 1}}, ["export"]),
        ({"train": {"device": "cpu", "log_every": 3, "checkpoint_every": 9, "wandb": "w"}}, []),
        ({"target": {"device": "cpu"}}, []),
        ({"name": "y"}, []),
    ],
)
def test_a_setting_changes_its_stage_and_what_follows(
    tmp_path: Path, tree: dict, old: list
) -> None:
    made(make_run(tmp_path))
    found = states(make_run(tmp_path, **tree))
    assert [name for name, state in found.items() if state == "changed"] == old
    assert {state for name, state in found.items() if name not in old} <= {"done"}


def test_every_setting_belongs_to_a_stage() -> None:
    prefixes = {prefix for stage in STAGES.values() for prefix in stage.settings}
    assert set(Recipe.model_fields) - prefixes == {"name", "hardware"}  # hardware: of --plan alone


def test_changed_file_contents_count(tmp_path: Path) -> None:
    made(make_run(tmp_path))
    other = make_run(tmp_path, files=FILES | {"answers": {"prompts.sha256": "other"}})
    status = other.status(ANSWERS)
    assert status.changes == {"prompts.sha256": ("1", "other")}


def test_a_refusal_names_setting_and_both_values(tmp_path: Path) -> None:
    made(make_run(tmp_path))
    run = make_run(tmp_path, train={"steps": 5}, head={"head_dim": 8})
    with pytest.raises(UserError) as caught:
        run.refuse_changes(run.plan("export"))
    assert "train.steps: 1000 in the run, 5 now" in caught.value.what
    assert "head.head_dim: None in the run, 8 now" in caught.value.what
    assert "--force" in caught.value.do
    assert "name=other" in caught.value.do


def test_cheap_stages_are_not_refused(tmp_path: Path) -> None:
    made(make_run(tmp_path))
    run = make_run(tmp_path, eval={"k": 1})
    run.refuse_changes(run.plan("head", "eval", "export"))


def test_what_nobody_needs_is_not_made_again(tmp_path: Path) -> None:
    run = made(make_run(tmp_path))
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


def test_remove_takes_what_follows_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(make_run(tmp_path))
    (tmp_path / "train").mkdir()
    (tmp_path / "answers.partial.jsonl").write_text("")
    removed: list[str] = []
    unlink = Path.unlink

    def watched(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "stages":
            removed.append(path.stem)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", watched)
    run.remove(STAGES["store"])
    assert removed == ["eval", "export", "head", "store"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "answers.jsonl",
        "answers.partial.jsonl",
        "stages",
    ]
    run.remove(ANSWERS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stages"]


def test_removing_a_link_leaves_what_it_points_at(tmp_path: Path) -> None:
    elsewhere = tmp_path / "disk"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("")
    run = made(make_run(tmp_path / "run"), "answers")
    (tmp_path / "run" / "store").symlink_to(elsewhere)
    run.remove(STAGES["store"])
    assert (elsewhere / "kept").exists()
    assert not (tmp_path / "run" / "store").exists()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    refused = pytest.raises(UserError, match="another draftlab process")
    with lock(tmp_path), refused, lock(run.folder):
        pass
    with lock(run.folder):
        pass


def test_making_with_other_settings_is_booked(tmp_path: Path) -> None:
    run = made(make_run(tmp_path))
    own = flatten(parse_recipe({"name": "x"}).eval, "eval.") | FILES["eval"]
    with making_otherwise(tmp_path, EVAL, own | {"target.device": "cpu"}):
        pass
    assert run.status(EVAL).state == "done"  # the recipe's own settings, and a free one
    with making_otherwise(tmp_path, EVAL, own | {"eval.k": 3}):
        pass
    assert run.status(EVAL).changes == {"eval.k": (3, None)}
    assert run.status(EXPORT).state == "done"


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    run = made(make_run(tmp_path))
    for text in ("[]", '{"complete": true}', "{"):
        book(tmp_path, HEAD).write_text(text)
        with pytest.raises(UserError) as caught:
            run.plan("head")
        assert str(book(tmp_path, HEAD)) in str(caught.value)


def test_latest_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run yet"):
        find_run(None)
    with pytest.raises(UserError, match="expected a run, found none"):
        find_run("a")
    for name in ("a", "b"):
        run = make_run(Path("runs") / name)
        run.adopt("seed: 1")
        assert find_run(None).name == name
    before = {p: p.lstat().st_mtime_ns for p in Path("runs").rglob("*")}
    run.adopt("seed: 1")
    assert {p: p.lstat().st_mtime_ns for p in Path("runs").rglob("*")} == before
    run.adopt("seed: 2")
    assert Path("runs/b/recipe.yaml").read_text() == "seed: 2"
    assert find_run("a") == find_run("runs/a") == tmp_path / "runs" / "a"
    assert not [p for p in Path("runs").iterdir() if p.name.startswith(".")]


def test_the_commit_is_of_our_own_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Installed into an environment inside another project's working tree.
    inside = tmp_path / "site-packages" / "draftlab"
    inside.mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(run_module, "__file__", str(inside / "pipeline" / "run_folder.py"))
    asked = []
    monkeypatch.setattr(run_module.subprocess, "run", lambda *a, **k: asked.append(a))
    assert git_commit() is None
    assert asked == []


def test_keys_are_hashes_of_all_inputs(tmp_path: Path) -> None:
    first, second = make_run(tmp_path), make_run(tmp_path, eval={"k": 1})
    assert first.key(HEAD) == second.key(HEAD)
    assert first.key(EVAL) != second.key(EVAL)
    assert len(first.key(EVAL)) == 64
    made(first, "answers")
    assert read_json(book(tmp_path, ANSWERS))["inputs"] == first.inputs(ANSWERS)


def test_books_from_before_a_setting_was_added_have_what_it_was_then(tmp_path: Path) -> None:
    store = STAGES["store"]
    with Run(tmp_path, {"record.dtype": "fp8"}, {}).making(store) as folder:
        folder.mkdir()
    now = {"record.dtype": "fp8", "record.backend": "transformers"}
    assert Run(tmp_path, now, {}).status(store).changes == {}
    other = Run(tmp_path, now | {"record.backend": "vllm"}, {}).status(store)
    assert other.changes == {"record.backend": ("transformers", "vllm")}
