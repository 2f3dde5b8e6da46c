"""Recipes for large targets run end to end on a tiny target of the same architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.evaluate.results import Report
from draftlab.export import verify_export
from draftlab.heads.folder import load_config
from draftlab.pipeline.recipe import load_recipe
from tests.helpers.small_run import draftlab, write_prompts
from tests.helpers.toys import toy_tokenizer
from tests.helpers.zoo import zoo_folder

RECIPES = Path(__file__).parents[2] / "recipes"
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


def tiny_target(folder: Path, kind: str, layers: int = 4) -> None:
    """A random model with a tokenizer, and rows of embeddings that no token has."""
    tokenizer = toy_tokenizer()
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    size = len(tokenizer) + 64
    sizes = {"vocab_size": size, "num_hidden_layers": layers, "max_position_embeddings": 512}
    zoo_folder(folder, kind, **sizes, **ids)
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "kind", "layers"), [("llama3_peagle", "llama", 2), ("gpt_oss_peagle", "gpt_oss", 4)]
)
def test_a_recipe_runs_from_prompts_to_export(
    tmp_path: Path, name: str, kind: str, layers: int
) -> None:
    tiny_target(tmp_path / "toy", kind)
    write_prompts(tmp_path / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    asked = load_recipe(RECIPES / f"{name}.yaml", SMALL)
    result = draftlab(tmp_path, "run", str(RECIPES / f"{name}.yaml"), *SMALL)
    assert result.exit_code == 0, result.output
    assert "predicted AL" in result.output

    run = tmp_path / "runs" / name
    config = load_config(run / "head")
    assert (config.family, config.num_layers, config.k_trained) == ("peagle", layers, 8)
    assert (config.qk_norm, config.intermediate_size) == (
        asked.head.qk_norm,
        asked.head.intermediate_size or 48,
    )
    lines = (run / "train" / "metrics.jsonl").read_text().splitlines()
    assert len(json.loads(lines[-1])["validation"]["alpha"]) == 8

    report = Report.read(run / "eval" / "report.json")
    drafted = [row for row in report.rows if row.drafter != "none"]
    assert {row.drafter for row in drafted} == {"parallel"}
    assert {row.k for row in drafted} == {3, 5, 8}
    assert all(row.drafts > 0 for row in drafted)

    out = run / "export" / "speculators"
    verify_export(out, run / "head", tmp_path / "toy", "speculators")
    written = json.loads((out / "config.json").read_text())
    assert written["speculators_model_type"] == "peagle"
    assert written["mask_token_id"] == config.mask_token_id
    layer = written["transformer_layer_config"]
    assert layer["model_type"] == ("qwen3" if config.qk_norm else "llama")
    assert layer["max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("name", "kind", "family"),
    [
        ("llama3_eagle3", "llama", "eagle3"),
        ("qwen3_eagle3", "qwen3", "eagle3"),
        ("gpt_oss_eagle3", "gpt_oss", "eagle3"),
        ("quickstart_eagle", "llama", "eagle"),
    ],
)
def test_a_chains_recipe_runs_from_prompts_to_exports(
    tmp_path: Path, name: str, kind: str, family: str
) -> None:
    tiny_target(tmp_path / "toy", kind, layers=8)
    write_prompts(tmp_path / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    # The quickstart's own prompts and heads are for the embedded target.
    embedded = ("prompts.source=prompts.jsonl", "eval.compare=[]", "eval.suite=prompts.jsonl")
    small = (*SMALL, "eval.timing_prompts=0", *(embedded if name.startswith("quick") else ()))
    asked = load_recipe(RECIPES / f"{name}.yaml", small)
    result = draftlab(tmp_path, "run", str(RECIPES / f"{name}.yaml"), *small)
    assert result.exit_code == 0, result.output
    assert "predicted AL" in result.output

    run = tmp_path / "runs" / name
    config = load_config(run / "head")
    assert (config.family, config.k_trained) == (family, asked.train.ttt_steps)
    assert config.boundaries == ((8,) if family == "eagle" else (2, 4, 5))
    assert config.norm_before_fc == asked.head.norm_before_fc == (kind == "gpt_oss")
    report = Report.read(run / "eval" / "report.json")
    drafted = [row for row in report.rows if row.drafter != "none"]
    assert {row.drafter for row in drafted} == {"chain"}
    assert all(row.drafts > 0 for row in drafted)
    assert {p.name for p in (run / "export").iterdir()} == set(asked.export.formats)
    for program in asked.export.formats:
        verify_export(run / "export" / program, run / "head", tmp_path / "toy", program)
