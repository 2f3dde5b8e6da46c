"""New heads: boundaries, settings of Llama 4 heads, and recipes that do not fit their target."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import yaml
from transformers import (
    GPT2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    OPTConfig,
)

from draftlab.errors import UserError
from draftlab.heads.config import HeadConfig
from draftlab.heads.family import get_family
from draftlab.plan.estimate import RecipeSizes
from draftlab.plan.preflight import check_before_run
from draftlab.recipe.head_spec import (
    head_config,
    head_rope,
    norm_epsilon,
    planned_identity,
)
from draftlab.recipe.recipe import load_recipe, parse_recipe, to_yaml
from draftlab.run.stages import STAGES
from draftlab.train.settings import HeadSettings
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import RECIPES
from tests.helpers.zoo import zoo_config


@pytest.mark.parametrize(
    ("kind", "changes", "expected", "line"),
    [
        ("llama", {}, {"rope_type": "default", "rope_theta": 10000.0}, None),
        (
            "qwen3_next",
            {},
            {"rope_type": "default", "rope_theta": 10000.0},
            "rope: the target rotates 25% of the channels, and the head all",
        ),
        (
            "gemma3_text",
            {},
            {"rope_type": "default", "rope_theta": 1e6},
            "rope: of the target's (sliding_attention, full_attention) the head has that of "
            "full_attention",
        ),
        (
            "ministral3",
            {},
            {"rope_type": "default", "rope_theta": 10000.0},
            "rope: the head uses only rope_theta 10000 of the target's yarn",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
            None,
        ),
    ],
)
def test_the_rope_of_a_head(
    kind: str, changes: dict[str, Any], expected: dict[str, Any], line: str | None
) -> None:
    monitor = RecordingMonitor()
    config = zoo_config(kind, **changes)
    assert head_rope(config, get_family("eagle3"), monitor) == expected
    assert monitor.lines == ([line] if line else [])


@pytest.mark.parametrize(
    ("kind", "epsilon"), [("llama", 1e-6), ("lfm2", 1e-5), ("nemotron_h", 1e-5)]
)
def test_the_epsilon_of_a_heads_norms(kind: str, epsilon: float) -> None:
    assert norm_epsilon(zoo_config(kind), RecordingMonitor()) == epsilon


def test_the_rope_of_a_target_with_sets_of_other_names() -> None:
    monitor, main = RecordingMonitor(), {"rope_type": "default", "rope_theta": 2e4}
    config = LlamaConfig()
    config.rope_parameters = {"main": main, "compress": main | {"rope_theta": 16e4}}
    assert head_rope(config, get_family("eagle3"), monitor) == main
    assert monitor.lines == ["rope: of the target's (main, compress) the head has that of main"]


def head_of(config: Any, **settings: Any) -> tuple[HeadConfig, list[str]]:
    """Return the config of a head for a target that was never loaded, and what was said."""
    config.architectures = ["Model"]
    recipe, monitor = parse_recipe({"name": "r", "head": settings}), RecordingMonitor()
    identity = planned_identity(recipe, config)
    return head_config(recipe, identity, 64, monitor, target=config), monitor.lines


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (GPT2Config(), "intermediate_size"),
        (OPTConfig(), "intermediate_size"),
        (Mamba2Config(), "num_attention_heads"),
    ],
)
def test_a_shape_that_the_targets_config_does_not_name_is_asked_for(config: Any, name: str) -> None:
    with pytest.raises(UserError) as error:
        head_of(config)
    assert f"expected {name} in the target's config, found none" in str(error.value)
    assert f"head.{name}" in str(error.value)


def test_a_head_for_a_target_whose_config_has_other_names() -> None:
    head, lines = head_of(GPT2Config(n_embd=64, n_head=4), intermediate_size=96)
    assert (head.intermediate_size, head.max_position_embeddings) == (96, 1024)
    assert head.num_attention_heads == head.num_key_value_heads == 4
    head, lines = head_of(MptConfig(d_model=64, n_heads=4, max_seq_len=512), intermediate_size=96)
    assert (head.max_position_embeddings, head.rms_norm_eps) == (512, 1e-5)
    text = "target's attention does not rotate"
    assert sum(text in line for line in lines) == 1


def test_a_target_without_a_number_of_positions_is_refused() -> None:
    with pytest.raises(UserError, match="expected max_position_embeddings"):
        head_of(Mamba2Config(), num_attention_heads=4, intermediate_size=96)


LLAMA4 = Llama4TextConfig(
    num_hidden_layers=4, attention_chunk_size=64, use_qk_norm=False, floor_scale=100, attn_scale=0.3
)


def attention(target: Any, **settings: Any) -> dict[str, Any]:
    layers = settings.pop("num_layers", 1)
    head = HeadSettings(family="eagle_llama4", num_layers=layers, llama4=settings)
    return get_family("eagle_llama4").config_fields(head, target)["llama4"].model_dump()


def test_a_llama4_head_follows_its_target() -> None:
    assert attention(LLAMA4) == {
        "no_rope_layers": (1,),
        "attention_chunk_size": 64,
        "use_qk_norm": False,
        "attn_temperature_tuning": True,
        "floor_scale": 100,
        "attn_scale": 0.3,
    }
    assert attention(LLAMA4, num_layers=4)["no_rope_layers"] == (1, 1, 1, 0)


def test_a_llama4_head_has_the_recipes_rope_and_llama4s_other_values() -> None:
    assert attention(LLAMA4, no_rope_layers=[0])["no_rope_layers"] == (0,)
    other = attention(LlamaConfig())
    assert (other["attention_chunk_size"], other["floor_scale"]) == (8192, 8192)


def test_other_families_have_no_such_settings() -> None:
    with pytest.raises(UserError, match="EAGLE3 heads have no llama4"):
        parse_recipe({"name": "r", "head": {"llama4": {"no_rope_layers": [1]}}})
    # recipe.yaml of a run contains all settings, also those that are None.
    unset = {"llama4": {"no_rope_layers": None}}
    assert parse_recipe({"name": "r", "head": unset}).head.llama4.no_rope_layers is None


def test_template_arguments_that_nothing_reads_are_reported_before_the_run() -> None:
    target = {"template_arguments": {"enable_thinking": False}}
    recipe = parse_recipe({"name": "r", "target": target})
    (warning,) = check_before_run(recipe, ["answers"])
    assert check_before_run(recipe, []) == []
    assert "the chat template does not read 'enable_thinking'" in warning


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"record": {"boundaries": [1, 23, 44]}},
            "found [1, 23, 44]\nat: record.boundaries\n"
            "record.boundaries=null takes this target's default ones, [2, 6, 9]",
        ),
        (
            {"head": {"family": "eagle"}, "record": {"boundaries": [13]}},
            "record.boundaries=null records none, which is enough for eagle heads",
        ),
        (
            {"head": {"family": "eagle"}, "export": {"formats": ["llamacpp"]}},
            "at: export.formats",
        ),
        (
            {"head": {"family": "peagle", "mask_token": 6144}, "export": {"formats": ["vllm"]}},
            "lies outside the 6144 rows of embeddings (ids 0 to 6143)\nat: head",
        ),
        (
            {
                "head": {"family": "eagle_llama4", "llama4": {"no_rope_layers": [1, 0]}},
                "export": {"formats": ["vllm"]},
            },
            "one number for each of the head's 1 layers, found [1, 0]\nat: head",
        ),
        ({"head": {"num_layers": 5}}, "at most 4 layers, found num_layers 5\nat: head"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_by_the_plan_and_by_the_run(
    settings: dict[str, Any], message: str
) -> None:
    recipe = parse_recipe({"name": "r", **settings})
    for check in (partial(check_before_run, stages=STAGES), RecipeSizes):
        with pytest.raises(UserError) as caught:
            check(recipe)
        assert message in str(caught.value)


def test_the_recipe_of_a_run_whose_head_has_its_own_loss_can_be_planned() -> None:
    """It names every setting, and so a loss that has no effect."""
    recipe = load_recipe(RECIPES / "quickstart_dspark.yaml")
    written = parse_recipe(yaml.safe_load(to_yaml(recipe)))
    assert check_before_run(written, ["head"], plan=True) == []
