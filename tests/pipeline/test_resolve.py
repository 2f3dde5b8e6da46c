"""Which target a verb takes: what lies beside a head does not decide that its code may run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftlab.pipeline.head_workspace import open_head
from draftlab.pipeline.recipe import Recipe, load_recipe, to_yaml
from draftlab.pipeline.resolve import find_target, recipe_of, reference_head
from draftlab.target_model.settings import TargetSettings
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import draftlab
from tests.helpers.toys import toy_target_folder


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that exists once the code of the target has run."""
    return tmp_path / "code-ran"


@pytest.fixture(params=["config", "tokenizer"])
def strangers_run(request: pytest.FixtureRequest, tmp_path: Path, marker: Path) -> Path:
    """A run folder whose recipe names a target with code and says that it may run.

    The code is named by config.json or only by tokenizer_config.json.
    """
    run = tmp_path / "runs/q"
    target = toy_target_folder(run / "target", layers=2)
    file, auto = {
        "config": (
            "config.json",
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C"}},
        ),
        "tokenizer": (
            "tokenizer_config.json",
            {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["mine.T", "mine.T"]}},
        ),
    }[request.param]
    fields = json.loads((target / file).read_text()) | auto
    (target / file).write_text(json.dumps(fields))
    (target / "mine.py").write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n"
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        "class C(PretrainedConfig):\n    model_type = 'mine'\n"
        "class T(PreTrainedTokenizerFast):\n    pass\n"
    )
    shutil.copytree(reference_head(), run / "head")
    (run / "stages").mkdir()
    settings = TargetSettings(path="runs/q/target", trust_remote_code=True, device="cpu")
    (run / "recipe.yaml").write_text(to_yaml(Recipe(name="q", target=settings)))
    return run


VERBS = {
    "eval --run": ("eval", "--run", "q"),
    "eval --run PATH": ("eval", "--run", "runs/q"),
    "eval --head": ("eval", "--head", "runs/q/head", "--suite", "embedded:heldout"),
    "eval of the latest": ("eval",),
    "doctor": ("doctor", "runs/q/head", "--device", "cpu"),
    "doctor of a run": ("doctor", "q"),
    "export": ("export", "--run", "q", "--to", "vllm"),
    "push": ("push", "q", "me/mine", "--dry-run", "--base-model", "me/base"),
    "inspect": ("inspect", "q"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_code_of_a_target_beside_a_head_does_not_run(
    verb: str, strangers_run: Path, marker: Path
) -> None:
    (strangers_run.parent / "latest").symlink_to("q")
    result = draftlab(strangers_run.parents[1], *VERBS[verb])
    assert not marker.exists()
    assert "internal error" not in result.output
    if verb != "inspect":
        assert "target: runs/q/target, from" in result.stderr
        assert "q/recipe.yaml" in "".join(result.stderr.split())


@pytest.mark.parametrize(
    ("strangers_run", "verb"),
    [
        ("config", "eval --run"),
        ("config", "doctor"),
        ("tokenizer", "eval --head"),
    ],
    indirect=["strangers_run"],
)
def test_it_runs_when_the_command_line_says_so(
    verb: str, strangers_run: Path, marker: Path
) -> None:
    draftlab(strangers_run.parents[1], *VERBS[verb], "--trust-remote-code")
    assert marker.exists()


@pytest.mark.parametrize("strangers_run", ["config"], indirect=True)
@pytest.mark.parametrize("verb", ["eval --run", "doctor"])
def test_the_refusal_says_how_to_trust_it(verb: str, strangers_run: Path) -> None:
    text = " ".join(draftlab(strangers_run.parents[1], *VERBS[verb]).output.split())
    assert "read its Python files; then say --trust-remote-code" in text


def test_a_recipe_that_the_user_names_is_trusted(strangers_run: Path) -> None:
    assert load_recipe(strangers_run / "recipe.yaml").target.trust_remote_code
    assert not recipe_of(strangers_run).target.trust_remote_code
    assert recipe_of(strangers_run, trust_remote_code=True).target.trust_remote_code


def test_the_target_is_said_with_what_names_it(
    strangers_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(strangers_run.parents[1])
    recipe, head = strangers_run / "recipe.yaml", strangers_run / "head"
    monitor = RecordingMonitor()
    find_target(head, None, monitor=monitor)
    find_target(head, "embedded", monitor=monitor)
    find_target(reference_head(), None, monitor=monitor)
    open_head("q", None, None, monitor=monitor)
    open_head("q", None, "org/name", monitor=monitor)
    assert monitor.lines == [
        f"target: runs/q/target, from {recipe}",
        "target: embedded, from --target",
        f"target: embedded, from {reference_head()}",
        f"target: runs/q/target, from {recipe}",
        "target: org/name, from --target",
    ]
