"""Which target a verb takes: what lies beside a head does not decide that its code may run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.recipe.recipe import Recipe, load_recipe, to_yaml
from draftlab.run.head_workspace import open_head
from draftlab.run.resolve import reference_head
from draftlab.target_model.settings import TargetSettings
from tests.helpers.small_run import draftlab, ran
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
    "train": ("train", "runs/q/recipe.yaml"),
    "run --rehearse": ("run", "runs/q/recipe.yaml", "--rehearse"),
    "record --plan": ("record", "runs/q/recipe.yaml", "--plan"),
}
NO_LINE = ("inspect", "train", "run --rehearse", "record --plan")
"""Verbs that do not say which target they take."""


@pytest.mark.parametrize("verb", VERBS)
def test_code_of_a_target_beside_a_head_does_not_run(
    verb: str, strangers_run: Path, marker: Path
) -> None:
    (strangers_run.parent / "latest").symlink_to("q")
    result = draftlab(strangers_run.parents[1], *VERBS[verb])
    assert not marker.exists()
    assert "internal error" not in result.output
    if verb not in NO_LINE:
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
    workshop, named = strangers_run.parents[1], ("--target", "runs/q/target")
    refusal = draftlab(workshop, *VERBS[verb], "--trust-remote-code")
    assert "expected --target beside --trust-remote-code" in refusal.stderr
    assert not marker.exists()
    draftlab(workshop, *VERBS[verb], "--trust-remote-code", *named)
    assert marker.exists()


@pytest.mark.parametrize("strangers_run", ["config"], indirect=True)
def test_an_unfinished_run_is_not_trusted_by_its_advice(strangers_run: Path, marker: Path) -> None:
    """Without a head `eval` advises to train; a stranger may leave out stages/, too."""
    shutil.rmtree(strangers_run / "head")
    (strangers_run / "stages").rmdir()
    advice = draftlab(strangers_run.parents[1], "eval", "--run", "runs/q").stderr
    recipe = re.search("`draftlab train (.*)`", " ".join(advice.split()))[1]
    result = draftlab(strangers_run.parents[1], "train", recipe)
    assert "needs code that the checkpoint ships" in result.stderr
    assert not marker.exists()


@pytest.mark.parametrize(
    ("overrides", "missing"),
    [
        (["target.trust_remote_code=true"], "target and target.revision"),
        (["target.trust_remote_code=true", "target=org/name"], "target.revision"),
        (["target.trust_remote_code=true", "target.path=x", "target.revision=main"], ""),
        (["target={path: x, trust_remote_code: true}"], ""),
        ([], "no trust"),
    ],
)
def test_overrides_that_trust_code_name_it(
    overrides: list[str], missing: str, tmp_path: Path
) -> None:
    """A revision such as refs/pr/7 has code of whoever made it."""
    settings = TargetSettings(path="org/name", revision="refs/pr/7", trust_remote_code=True)
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(Recipe(name="q", target=settings)))
    if missing in ("", "no trust"):
        assert load_recipe(path, overrides).target.trust_remote_code is (not missing)
        return
    with pytest.raises(UserError, match=f"the overrides to name {missing}, too"):
        load_recipe(path, overrides)


def test_a_named_target_has_not_the_revision_of_a_strangers_recipe(strangers_run: Path) -> None:
    recipe = strangers_run / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("revision: null", "revision: refs/pr/7"))
    workspace = open_head(str(strangers_run), None, "org/name", trust_remote_code=True)
    assert workspace.target.trust_remote_code
    assert workspace.target.revision is None


CODE = {
    "no sizes": "class C(PretrainedConfig):\n    model_type = 'mine'\n"
    "    def __init__(self, **k): super().__init__()\n",
    "broken config": "class C(LlamaConfig):\n    model_type = 'mine'\n"
    "    def get_text_config(self, *a, **k): raise KeyError(1)\n",
    "broken model": "class C(LlamaConfig):\n    model_type = 'mine'\n"
    "class M(PreTrainedModel):\n    config_class = C\n"
    "    def __init__(self, *a, **k): raise AttributeError('boo')\n",
}


@pytest.mark.parametrize("strangers_run", ["config"], indirect=True)
@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "--run", "q", "--suite", "embedded:heldout", "--target", "runs/q/target"),
        ("train", "runs/q/recipe.yaml", "--plan", "target=runs/q/target"),
    ],
)
def test_what_trusted_code_raises_is_no_bug_of_draftlab(
    arguments: tuple[str, ...], code: str, strangers_run: Path
) -> None:
    target = strangers_run / "target"
    fields = json.loads((target / "config.json").read_text())
    fields["auto_map"]["AutoModelForCausalLM"] = "mine.M"
    (target / "config.json").write_text(json.dumps(fields))
    imported = "from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel\n"
    (target / "mine.py").write_text(imported + CODE[code])
    trust = "target.trust_remote_code=true" if arguments[0] == "train" else "--trust-remote-code"
    result = ran(strangers_run.parents[1], *arguments, trust, code=2)
    assert "does not load: " in result.stderr


def test_a_recipe_outside_of_runs_is_trusted(strangers_run: Path, tmp_path: Path) -> None:
    own = Path(shutil.copy(strangers_run / "recipe.yaml", tmp_path / "own.yaml"))
    assert load_recipe(own).target.trust_remote_code
    beside = Path(shutil.copy(own, strangers_run / "own.yaml"))
    assert not load_recipe(beside).target.trust_remote_code
