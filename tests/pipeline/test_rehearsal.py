"""Rehearsals of shipped recipes on stand-ins, and plans of shipped recipes without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    Gemma4TextConfig,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)

from draftlab.errors import UserError
from draftlab.heads.folder import load_config
from draftlab.plan.estimate import RecipeSizes, estimate_table
from draftlab.recipe import head_spec
from draftlab.recipe.recipe import load_recipe
from draftlab.target_model import locate
from draftlab.target_model.locate import resolve_target, shipped_config
from draftlab.target_model.settings import TargetSettings
from draftlab.target_model.stand_in import check_architecture, stand_in_config
from draftlab.text.prompts import EMBEDDED_PROMPTS
from draftlab.text.settings import SELF
from tests.helpers.small_run import RECIPES, draftlab, ran, write_prompts
from tests.helpers.toys import toy_tokenizer

SHIPPED = [path.stem for path in sorted(RECIPES.glob("*.yaml")) if ".gguf" not in path.read_text()]


def real_target(recipe: str, folder: Path) -> dict[str, Any]:
    """Write the real config of a recipe's target with a small tokenizer; return the config."""
    source = shipped_config(load_recipe(RECIPES / f"{recipe}.yaml").target)
    assert source is not None
    config = json.loads((source / "config.json").read_text())
    tokenizer = toy_tokenizer()
    text = config.get("text_config", config)
    text |= {"vocab_size": len(tokenizer) + 64, "bos_token_id": None, "pad_token_id": None}
    text["eos_token_id"] = tokenizer.eos_token_id
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return text


# Below the rehearsal's own sizes, which one recipe has; all layers of the targets remain.
SMALLER = (
    "regenerate.max_new_tokens=8",
    "prompts.max_prompts=8",
    "record.max_length=256",
    "train.row_tokens=256",
    "train.steps=2",
    "train.validate_every=1",
    "eval.max_prompts=2",
    "eval.max_new_tokens=4",
    "eval.timing_tokens=2",
)


@pytest.mark.parametrize(
    ("name", "boundaries"),
    [
        pytest.param("gpt_oss_eagle3", (2, 12, 21), marks=pytest.mark.slow),
        pytest.param("llama3_peagle", (2, 16, 29), marks=pytest.mark.slow),
        pytest.param("qwen3_next_eagle3", (2, 24, 45), marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_runs_every_stage(
    tmp_path: Path, name: str, boundaries: tuple[int, ...]
) -> None:
    config = real_target(name, tmp_path / "target")
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    settings = ["target=target", "draft_vocab.size=128"]
    if name != "llama3_peagle":
        settings += SMALLER
    if name.startswith("qwen3_next"):  # most of its time; the others are timed
        settings.append("eval.timing_prompts=0")
    ran(tmp_path, "run", str(RECIPES / f"{name}.yaml"), *settings, "--rehearse")
    run = tmp_path / "runs/rehearsals" / name
    head = load_config(run / "head")
    assert (head.family, head.boundaries) == (recipe.head.family, boundaries)
    assert head.target_num_layers == config["num_hidden_layers"]
    assert head.k_trained == recipe.train.ttt_steps
    assert {p.name for p in (run / "export").iterdir()} == set(recipe.export.formats)
    rows = json.loads((run / "eval/report.json").read_text())["rows"]
    assert {row["k"] for row in rows if row["drafter"] != "none"} == set(recipe.eval.k or ())


@pytest.mark.parametrize(
    "config", [FalconH1Config(), FalconH1Config(mamba_d_head=64, mamba_d_ssm=None)]
)
def test_a_stand_in_of_falcon_h1_keeps_the_width_of_its_states(config: FalconH1Config) -> None:
    small = stand_in_config(config)
    width = small.mamba_d_ssm or small.mamba_expand * small.hidden_size
    assert width == small.mamba_n_heads * small.mamba_d_head < 512


@pytest.mark.parametrize(
    "config",
    [
        DeepseekV3Config(num_hidden_layers=3),
        Gemma4TextConfig(),
        OlmoeConfig(num_hidden_layers=3),
        Phi3Config(num_hidden_layers=3),
        Qwen3NextConfig(num_hidden_layers=4),
    ],
)
def test_a_small_model_of_default_shapes_decodes(config: PreTrainedConfig) -> None:
    assert check_architecture(config, "target", decodes=True) is None


def test_missing_tokenizer_files_are_named(tmp_path: Path) -> None:
    real_target("qwen3_eagle3", tmp_path / "target")
    (tmp_path / "target/tokenizer.json").unlink()
    recipe = str(RECIPES / "qwen3_eagle3.yaml")
    result = ran(tmp_path, "run", recipe, "target=target", "--rehearse", code=2)
    assert "tokenizer.json or tokenizer.model" in result.output


def test_a_rehearsal_keeps_the_run_it_rehearses(folder: Path) -> None:
    before = (folder / "runs/small/head/model.safetensors").read_bytes()
    server = ("regenerate.backend=openai", "regenerate.server.url=http://127.0.0.1:9")
    result = ran(folder, "run", "small.yaml", "--rehearse", "train.steps=2", *server)
    assert "regenerate.backend: paged in place of openai" in result.output
    assert "reached their length limit unfinished" in result.output
    assert "warning: answers" not in result.output  # the limit is the rehearsal's own
    assert (folder / "runs/small/head/model.safetensors").read_bytes() == before
    assert (folder / "runs/latest").resolve().name == "small"
    rehearsal = folder / "runs/rehearsals/small"
    assert "\n  steps: 2\n" in (rehearsal / "recipe.yaml").read_text(), "smaller values stay"

    (rehearsal / "target").rename(folder / "elsewhere")
    result = ran(folder, "run", "small.yaml", "--rehearse", code=2)
    assert "expected the folder of an earlier rehearsal" in result.output
    assert (rehearsal / "head").is_dir()


def test_a_rehearsal_keeps_limits_below_its_own(folder: Path) -> None:
    """Conversations that the recipe cuts to a row are cut in its rehearsal too."""
    texts = [f"def f{i}(use): " + "the user and " * 40 for i in range(8)]
    write_prompts(folder / "prompts.jsonl", ["def f(use): the user", *texts])
    limits = ("record.max_length=96", "prompts.max_prompts=4", "eval.max_prompts=2")
    ran(folder, "run", "small.yaml", "--rehearse", *limits)
    run = folder / "runs/rehearsals/small"
    assert json.loads((run / "store/manifest.json").read_text())["settings"]["max_length"] == 96
    assert len((run / "answers.jsonl").read_text().splitlines()) == 4
    assert "max_prompts: 2" in (run / "recipe.yaml").read_text()


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let every request to the Hub be refused, and its cache be empty."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", SHIPPED)
def test_plans_of_shipped_recipes_need_no_network(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor prompts, whose absence the exit code tells; and they write no run folder."""
    monkeypatch.setattr(locate, "hub_answers", lambda: pytest.fail("asks the Hub"))
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = draftlab(tmp_path, "train", str(RECIPES / f"{name}.yaml"), "--plan")
    missing = recipe.prompts.source not in (*EMBEDDED_PROMPTS, SELF)
    assert result.exit_code == (2 if missing else 0), result.output
    assert "estimate (" in result.output
    assert not (tmp_path / "runs").exists()
    if recipe.target.path == "embedded":
        return
    assert recipe.hardware.gpu, "a recipe for a large target names its hardware"
    target = RecipeSizes(recipe).stages()[0]
    billions = {
        "Llama-3.1-8B": 8.03,
        "Qwen3-8B": 8.19,
        "gpt-oss-20b": 6.72,  # in 4 bits
        "Scout": 108,
        "Qwen3-Next-80B": 79.7,
        "Nemotron-H-8B": 8.1,
        "Qwen3.5-0.8B": 0.752,  # without its vision tower
    }
    (expected,) = (size for key, size in billions.items() if key in recipe.target.path)
    assert target.disk == pytest.approx(2e9 * expected, rel=0.01)
    assert "shapes of this target in draftlab" in next(estimate_table(recipe, tmp_path, ()))


@pytest.mark.usefixtures("no_network")
def test_a_hub_that_does_not_answer_is_named_at_once() -> None:
    target = TargetSettings(path="organisation/model")
    for function in (resolve_target, head_spec.target_config):
        with pytest.raises(UserError, match="the Hub does not answer") as error:
            function(target)
        assert error.value.do
