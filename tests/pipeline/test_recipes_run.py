"""Recipes for large targets run from prompts to exports, on tiny targets of their architecture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftlab.evaluate.results import Report, Row
from draftlab.heads.config import HeadConfig
from draftlab.heads.folder import load_config
from draftlab.recipe.recipe import Recipe, load_recipe
from tests.helpers.hybrid_zoo import HYBRID
from tests.helpers.small_run import RECIPES, draftlab, ran, write_prompts
from tests.helpers.zoo import zoo_folder_with_tokenizer

# The target and sizes, nothing else.
SMALL = (
    "target=toy",
    "target.dtype=float32",
    "regenerate.max_new_tokens=24",
    "regenerate.batch=8",
    "regenerate.piece=16",
    "record.shard_tokens=256",
    "record.batch_tokens=256",
    "draft_vocab.size=128",
    "train.steps=4",
    "train.row_tokens=128",
    "train.batch_rows=2",
    "train.validate_every=2",
    "train.validation_share=0.2",
    "eval.max_prompts=3",
    "eval.max_new_tokens=12",
    "eval.timing_prompts=1",
    "eval.timing_tokens=4",
)


def run_recipe(
    folder: Path, name: str, kind: str, *settings: str, unused_rows: int = 64, **sizes: Any
) -> tuple[Recipe, HeadConfig, list[Row], str]:
    """Run a recipe on a random target; return the recipe, the head, rows with drafts, the output.

    Args:
        unused_rows: rows of the target's embeddings that no token has.
        sizes: fields of the target's config.
    """
    zoo_folder_with_tokenizer(folder / "toy", kind, unused_rows=unused_rows, **sizes)
    write_prompts(folder / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    path = RECIPES / f"{name}.yaml"
    result = ran(folder, "run", str(path), *SMALL, *settings)
    assert "predicted AL" in result.output
    recipe, run = load_recipe(path, (*SMALL, *settings)), folder / "runs" / name
    rows = [row for row in Report.read(run / "eval/report.json").rows if row.drafter != "none"]
    assert all(row.drafts > 0 for row in rows)
    assert {p.name for p in (run / "export").iterdir()} == set(recipe.export.formats)
    return recipe, load_config(run / "head"), rows, " ".join(result.output.split())


def test_a_recipe_of_a_parallel_head(tmp_path: Path) -> None:
    name = "gpt_oss_peagle"
    recipe, config, rows, _ = run_recipe(tmp_path, name, "gpt_oss", num_hidden_layers=4)
    assert (config.family, config.num_layers, config.k_trained) == ("peagle", 4, 8)
    assert config.qk_norm == recipe.head.qk_norm
    assert config.intermediate_size == (recipe.head.intermediate_size or 48)
    lines = (tmp_path / "runs" / name / "train/metrics.jsonl").read_text().splitlines()
    assert len(json.loads(lines[-1])["validation"]["alpha"]) == 8
    assert {row.drafter for row in rows} == {"parallel"}
    assert {row.k for row in rows} == {3, 5, 8}

    export = tmp_path / "runs" / name / "export/speculators/config.json"
    fields = json.loads(export.read_text())
    assert fields["speculators_model_type"] == "peagle"
    assert fields["mask_token_id"] == config.mask_token_id
    layer = fields["transformer_layer_config"]
    assert layer["model_type"] == ("qwen3" if config.qk_norm else "llama")
    assert layer["max_position_embeddings"] == 512


def test_a_recipe_of_a_block_head(tmp_path: Path) -> None:
    name, settings = "qwen3_dspark", ("eval.timing_prompts=0", "draft_vocab.size=null")
    recipe, config, rows, _ = run_recipe(tmp_path, name, "qwen3", *settings, num_hidden_layers=8)
    assert (config.family, config.num_layers, config.k_trained) == ("dspark", 3, 7)
    assert config.draft_vocab_size == config.vocab_size
    assert {(row.drafter, row.k) for row in rows} == {("parallel", 4), ("parallel", 7)}
    exports = tmp_path / "runs" / name / "export"
    native = [
        json.loads((exports / f / "config.json").read_text()) for f in recipe.export.formats[1:]
    ]
    assert native[0] == native[1] == native[2]
    fields = native[0]
    assert fields["target_layer_ids"] == [b - 1 for b in config.boundaries]
    assert (fields["is_causal"], fields["sample_from_anchor"]) == (False, True)


def test_a_recipe_of_a_head_with_a_selector(tmp_path: Path) -> None:
    """llama.cpp needs wider heads than the toy's."""
    name, formats = "qwen3_dflash2", "export.formats=[speculators,vllm,sglang]"
    settings = ("eval.timing_prompts=0", "head.selector_rank=8", formats)
    _, config, rows, _ = run_recipe(tmp_path, name, "qwen3", *settings, num_hidden_layers=8)
    assert (config.family, config.num_layers, config.k_trained) == ("dflash2", 3, 7)
    assert (config.selector_rank, config.draft_vocab_size) == (8, config.vocab_size)
    assert {(row.drafter, row.k) for row in rows} == {("parallel", 4), ("parallel", 7)}
    exports = tmp_path / "runs" / name / "export"
    library = json.loads((exports / "speculators/config.json").read_text())
    native = json.loads((exports / "vllm/config.json").read_text())["dflash_config"]
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "block_size")
    assert [library[key] for key in keys] == [native[key] for key in keys] == [2, 16, 8, 16, 8]


def test_a_recipe_of_an_mtp_layer(tmp_path: Path) -> None:
    name, settings = "qwen3_5_mtp", ("eval.timing_prompts=0",)
    sizes = {"mtp_num_hidden_layers": 1}
    _, config, rows, output = run_recipe(tmp_path, name, "qwen3_5_text", *settings, **sizes)
    assert (config.family, config.boundaries, config.k_trained) == ("mtp", (4,), 4)
    assert "starts from random values" in output  # transformers does not save the layer
    assert {(row.drafter, row.k) for row in rows} == {("chain", 1), ("chain", 3)}


@pytest.mark.parametrize(
    ("name", "kind", "family"),
    [
        ("qwen3_eagle3", "qwen3", "eagle3"),
        ("quickstart_eagle", "llama", "eagle"),
    ],
)
def test_recipes_of_chains(tmp_path: Path, name: str, kind: str, family: str) -> None:
    # The quickstart's own prompts and heads are for the embedded target.
    embedded = ("prompts.source=prompts.jsonl", "eval.compare=[]", "eval.suite=prompts.jsonl")
    settings = ("eval.timing_prompts=0", *(embedded if name.startswith("quick") else ()))
    recipe, config, rows, _ = run_recipe(tmp_path, name, kind, *settings, num_hidden_layers=8)
    assert (config.family, config.k_trained) == (family, recipe.train.ttt_steps)
    assert config.boundaries == ((8,) if family == "eagle" else (2, 4, 5))
    assert {row.drafter for row in rows} == {"chain"}


def test_a_recipe_for_a_hybrid_target(tmp_path: Path) -> None:
    """tests/pipeline/test_rehearsal.py runs that of Qwen 3 Next."""
    name, kind, layers = "nemotron_h_eagle3", "nemotron_h", "layers_block_type"
    sizes = {"num_hidden_layers": 8, layers: HYBRID[kind][layers] * 2}
    settings = ("target.gpus=1", "eval.timing_prompts=0")
    _, config, rows, output = run_recipe(tmp_path, name, kind, *settings, **sizes)
    assert "attention does not rotate; the head does, with rope_theta 10000" in output
    assert config.boundaries == (2, 4, 5)
    assert set(config.rope_parameters) == {"rope_type", "rope_theta"}
    fields = json.loads((tmp_path / "runs" / name / "export/vllm/config.json").read_text())
    assert fields["rope_parameters"] == config.rope_parameters
    assert {row.drafter for row in rows} == {"chain"}
    plan = draftlab(tmp_path, "run", str(RECIPES / f"{name}.yaml"), "--plan", "name=plan")
    assert "recurrent states of" in " ".join(plan.output.split())


@pytest.mark.parametrize(
    ("name", "family", "boundaries", "formats"),
    [
        ("llama4_eagle3", "eagle3", (1, 23, 44), {"speculators", "vllm"}),
        ("llama4_eagle", "eagle_llama4", (4,), {"vllm"}),
    ],
)
def test_recipes_for_llama4(
    tmp_path: Path, name: str, family: str, boundaries: tuple[int, ...], formats: set[str]
) -> None:
    """The target is multimodal; every second layer has experts, every fourth has no RoPE."""
    layers = 48 if family == "eagle3" else 4
    recipe, config, rows, output = run_recipe(
        tmp_path, name, "llama4",
        "regenerate.max_new_tokens=12", "eval.max_new_tokens=6", "eval.max_prompts=2",
        "eval.timing_prompts=0",
        unused_rows=0, num_hidden_layers=layers, no_rope_layers=None, attention_chunk_size=16,
        initializer_range=0.1,
    )  # fmt: skip
    assert "Llama4ForCausalLM, the text model, only" in output
    assert set(recipe.export.formats) == formats
    assert (config.family, config.boundaries) == (family, boundaries)
    assert config.target.architecture == "Llama4ForConditionalGeneration"
    assert {(row.drafter, row.k) for row in rows} == {("chain", 3), ("chain", 5)}
    run = tmp_path / "runs" / name
    inspected = " ".join(draftlab(tmp_path, "inspect", str(run / "head")).output.split())
    default = " (by default [2, 24, 45])" if family == "eagle3" else ""
    assert f"{list(boundaries)} of {layers} layers{default}; each is the input of that" in inspected
    fields = json.loads((run / "export/vllm/config.json").read_text())
    assert fields["max_position_embeddings"] == 512
    if family == "eagle3":
        assert "[1, 23, 44] of 48 layers, as the recipe says (by default [2, 24, 45])" in output
        assert fields["eagle_aux_hidden_state_layer_ids"] == [1, 23, 44]
    else:
        assert config.llama4 is not None
        attention = config.llama4.model_dump(mode="json")
        assert (attention["no_rope_layers"], attention["attention_chunk_size"]) == ([1], 16)
        assert {key: fields[key] for key in attention} == attention
        assert fields["intermediate_size"] == 40  # that of dense layers, not of an expert
