"""The Llama 4 recipes from prompts to export, on a tiny multimodal Llama 4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.evaluate.results import Report
from draftlab.export import verify_export
from draftlab.heads.folder import load_config
from tests.helpers.small_run import draftlab, write_prompts
from tests.helpers.toys import toy_tokenizer
from tests.helpers.zoo import zoo_folder
from tests.pipeline.test_recipes_run import RECIPES, SMALL

SIZES = (
    *SMALL,
    "regenerate.max_new_tokens=12",
    "eval.max_new_tokens=6",
    "eval.max_prompts=2",
    "eval.timing_prompts=0",
)


def tiny_llama4(folder: Path, layers: int) -> None:
    """Half of its layers with experts, every fourth without RoPE, chunks of 16 positions."""
    tokenizer = toy_tokenizer()
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    zoo_folder(
        folder,
        "llama4",
        vocab_size=len(tokenizer),
        num_hidden_layers=layers,
        no_rope_layers=None,
        attention_chunk_size=16,
        max_position_embeddings=512,
        initializer_range=0.1,
        **ids,
    )
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "family", "boundaries", "layouts"),
    [
        ("llama4_eagle3", "eagle3", (1, 23, 44), {"speculators", "vllm"}),
        ("llama4_eagle", "eagle_llama4", (4,), {"vllm"}),
    ],
)
def test_a_recipe_runs_from_prompts_to_export(
    tmp_path: Path, name: str, family: str, boundaries: tuple[int, ...], layouts: set[str]
) -> None:
    layers = 48 if family == "eagle3" else 4
    tiny_llama4(tmp_path / "toy", layers)
    write_prompts(tmp_path / "prompts.jsonl", [f"def f{i}(use): the user {i}" for i in range(12)])
    result = draftlab(tmp_path, "run", str(RECIPES / f"{name}.yaml"), *SIZES)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "predicted AL" in said
    assert "Llama4ForCausalLM, the text model, only" in said
    if family == "eagle3":
        assert (
            "boundaries [1, 23, 44] of 48 layers, as the recipe says (by default [2, 24, 45])"
            in said
        )

    run = tmp_path / "runs" / name
    config = load_config(run / "head")
    assert (config.family, config.boundaries) == (family, boundaries)
    assert config.target.architecture == "Llama4ForConditionalGeneration"
    looked = " ".join(draftlab(tmp_path, "inspect", str(run / "head")).output.split())
    other = " (by default [2, 24, 45])" if family == "eagle3" else ""
    assert f"{list(boundaries)} of {layers} layers{other}; each is the input of that" in looked

    report = Report.read(run / "eval" / "report.json")
    drafted = [row for row in report.rows if row.drafter != "none"]
    assert {(row.drafter, row.k) for row in drafted} == {("chain", 3), ("chain", 5)}
    assert all(row.drafts > 0 for row in drafted)
    assert {p.name for p in (run / "export").iterdir()} == layouts
    for layout in layouts:
        verify_export(run / "export" / layout, run / "head", tmp_path / "toy", layout)
    written = json.loads((run / "export" / "vllm" / "config.json").read_text())
    assert written["max_position_embeddings"] == 512
    if family == "eagle3":
        assert written["eagle_aux_hidden_state_layer_ids"] == [1, 23, 44]
    else:
        assert config.llama4 is not None
        kind = config.llama4.model_dump(mode="json")
        assert kind == {
            "no_rope_layers": [1],
            "attention_chunk_size": 16,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 16,
            "attn_scale": 0.5,
        }
        assert {key: written[key] for key in kind} == kind
        assert written["intermediate_size"] == 40  # its dense layers', not an expert's
