"""What `--plan` says a recipe needs, with nothing of the target but its config.json."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Llama4Config, LlamaConfig

from draftlab.pipeline import pipeline
from draftlab.pipeline.estimate import CHECKPOINTS, estimate, needs
from draftlab.pipeline.hardware import GPUS
from draftlab.pipeline.head_spec import target_config
from draftlab.pipeline.recipe import Recipe, load_recipe, parse_recipe
from draftlab.pipeline.sizes import Conversations, HeadSize, TargetSize, planned_head
from draftlab.pipeline.stages import STAGES
from draftlab.store.manifest import StoreIdentity
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.small_run import draftlab, write_prompts
from tests.helpers.zoo import zoo_config, zoo_folder
from tests.pipeline.test_recipes_run import RECIPES

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
}
RECIPE = {"name": "r", "prompts": {"source": "not-there.jsonl", "max_prompts": 1000}}


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json of Llama-3.1-8B, and nothing else."""
    folder = tmp_path_factory.mktemp("eight")
    LlamaConfig(**LLAMA_8B).save_pretrained(folder)
    return folder


def recipe(folder: Path, **settings: Any) -> Recipe:
    where = {"path": str(folder), "dtype": "bfloat16"} | settings.pop("target", {})
    return parse_recipe(RECIPE | {"target": where} | settings)


def test_a_targets_size(eight: Path) -> None:
    asked = recipe(eight)
    size = TargetSize.of(asked, target_config(asked.target))
    assert size.parameters == size.active == 8_030_261_248
    assert size.kv_bytes == 2 * 32 * 8 * 128 * 2
    # One row reads the weights once; many are bound by products.
    h200 = GPUS["H200"]
    assert size.step_seconds(h200, 1, 0) == pytest.approx(16.06e9 / 4.8e12, rel=0.01)
    assert size.step_seconds(h200, 4096, 0) == pytest.approx(2 * 8.03e9 * 4096 / 989e12, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "llama4", "gpt_oss", "qwen3_moe"])
def test_parameters_are_those_of_the_loaded_target(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    model = load_target(TargetSettings(path=str(folder), device="cpu")).model
    asked = recipe(folder)
    size = TargetSize.of(asked, target_config(asked.target))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    text = zoo_config(kind).get_text_config()
    per_token = getattr(text, "num_experts_per_tok", 1)
    assert (size.active < size.parameters) == (kind != "llama")
    assert size.share == (1.0 if kind == "llama" else per_token / (8 if kind == "qwen3_moe" else 4))


def test_scout_and_maverick(tmp_path: Path) -> None:
    """Their published sizes: 17 B of 109 B and of 400 B parameters, vision included."""
    for name, text, total in (
        ("scout", {}, 108e9),
        ("maverick", {"num_local_experts": 128, "interleave_moe_layer_step": 2}, 401e9),
    ):
        Llama4Config(text_config=text).save_pretrained(tmp_path / name)
        asked = recipe(tmp_path / name)
        size = TargetSize.of(asked, target_config(asked.target))
        assert size.parameters == pytest.approx(total, rel=0.01)
        assert size.active == pytest.approx(17.2e9, rel=0.01)


def test_a_quantised_target(tmp_path: Path) -> None:
    """Sizes are those of 16 bits, said to be too large for its files."""
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    LlamaConfig(**LLAMA_8B, **quantised).save_pretrained(tmp_path)
    (line,) = (need.about for need in needs(recipe(tmp_path)) if need.name == "target")
    assert line == "LlamaForCausalLM: 8.03 B parameters; quantised, so its files take less"


def head_size(asked: Recipe) -> HeadSize:
    identity = StoreIdentity("t", "", "", "", (2, 16, 29), 32, 4096, 128256, asked.record.dtype)
    return HeadSize.of(planned_head(asked, target_config(asked.target), identity), asked)


def test_training_an_8b_head(eight: Path) -> None:
    """methods §2: 425 M parameters trained, 17.3 GFLOP a position, TTT 7."""
    train = {"ttt_steps": 7, "batch_rows": 4, "row_tokens": 2048}
    size = head_size(recipe(eight, draft_vocab={"size": 32000}, train=train))
    assert size.trained == pytest.approx(425e6, rel=0.01)
    assert size.flops == pytest.approx(17.3e9, rel=0.01)
    assert 15e9 < size.memory < 36e9  # what programs for this work were measured to take
    smaller = head_size(recipe(eight, draft_vocab={"size": 32000}, train=train | {"micro_rows": 1}))
    assert smaller.memory < size.memory
    assert smaller.flops == size.flops
    parallel = train | {"ttt_steps": 8, "cod_ratio": 0.8, "cod_min": 0.2}
    dropped, whole = (
        head_size(
            recipe(
                eight, draft_vocab={"size": 32000}, head={"family": "peagle"}, train=parallel | c
            )
        )
        for c in ({}, {"cod_ratio": 1.0})
    )
    assert dropped.flops / whole.flops == pytest.approx(34_088 / 65_536, rel=0.1)


def test_conversations_are_measured_or_assumed(eight: Path, tmp_path: Path) -> None:
    asked = recipe(eight, regenerate={"max_new_tokens": 100, "samples": 2})
    assumed = Conversations.of(asked, 4096)
    assert (assumed.count, assumed.length, assumed.assumed) == (2000, 356, True)
    write_prompts(tmp_path / "p.jsonl", ["a" * 1000] * 7)
    there = {"source": str(tmp_path / "p.jsonl"), "max_prompts": 5}
    found = Conversations.of(recipe(eight, prompts=there), 4096)
    assert (found.count, found.assumed) == (5, False)
    assert 250 < found.prompt < 300
    cut = Conversations.of(recipe(eight), 300)
    assert (cut.prompt, cut.answer) == (256, 44)
    given = Conversations.of(recipe(eight, regenerate={"enabled": False}), 4096)
    assert given.answer == 0


def test_the_table(eight: Path, tmp_path: Path) -> None:
    asked = recipe(
        eight, hardware={"gpu": "H200"}, record={"boundaries": [1, 20]}, draft_vocab={"size": 1000}
    )
    by_name = {need.name: need for need in needs(asked)}
    assert list(by_name) == ["target", "answers", "store", "head", "eval"]
    tokens = 1000 * (256 + asked.regenerate.max_new_tokens)
    assert by_name["store"].disk == tokens * (2 * 3 * 4096 + 16)
    trained = head_size(asked).trained  # of three boundaries: 4096² more
    assert by_name["head"].disk == (CHECKPOINTS * 12 + 2) * (trained - 4096**2)
    lines = list(estimate(asked, tmp_path / "runs", STAGES))
    assert lines[0].startswith("estimate (1 × H200)")
    assert "LlamaForCausalLM: 8.03 B parameters" in lines[2]
    assert "not-there.jsonl is not there: 256 tokens a prompt taken" in lines[3]
    assert lines[4].endswith("tokens of 24.6 kB, boundaries [1, 20] and the last state")
    assert lines[7].split()[:2] == ["in", "all"]
    assert not any("minutes" in line for line in estimate(recipe(eight), tmp_path, STAGES))
    compared = recipe(eight, eval={"k": [3, 5], "temperatures": [0, 1], "compare": ["reference"]})
    assert needs(compared)[-1].about.startswith("14 rows ")  # 1 + 2 · 2, and 1 + 2 · 2 · 2


def test_days_are_hours_without_exponents(eight: Path, tmp_path: Path) -> None:
    asked = recipe(eight, hardware={"gpu": "H200"}, train={"steps": 10**7})
    lines = list(estimate(asked, tmp_path / "runs", STAGES))
    assert any(re.search(r"\d,\d+ hours", line) for line in lines)
    assert not any("e+" in line for line in lines)


def test_conversations_are_cut_when_they_are_stored_not_when_they_are_answered(
    eight: Path, tmp_path: Path
) -> None:
    for positions, asked_for, stored in (
        (4096, None, 384),
        (4096, 200, 200),
        (300, None, 300),
        (300, 4096, 300),
    ):
        LlamaConfig(**LLAMA_8B | {"max_position_embeddings": positions}).save_pretrained(tmp_path)
        found = needs(recipe(tmp_path, record={"max_length": asked_for}))
        by_name = {need.name: need for need in found}
        written = 1000 * (min(384, positions) - 256)
        assert f"at most {written:,} tokens to write" in by_name["answers"].about
        assert by_name["store"].disk == 1000 * stored * (4 * 2 * 4096 + 16)
        said = "conversations of at most the target's 300 positions" in by_name["store"].about
        assert said == (asked_for == 4096)


def test_positions_of_longrope_are_those_it_is_used_at(tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, "phi3")
    asked = recipe(folder)
    used = load_target(TargetSettings(path=str(folder), device="cpu")).max_length
    assert TargetSize.of(asked, target_config(asked.target)).max_length == used
    assert used < zoo_config("phi3").max_position_embeddings


def test_online_nothing_is_stored_and_the_target_runs_along(eight: Path) -> None:
    h200 = {"gpu": "H200"}
    stored, online = (
        {need.name: need for need in needs(recipe(eight, record={"online": way}, hardware=h200))}
        for way in (False, True)
    )
    assert stored["store"].disk
    assert online["store"].disk is None
    assert online["head"].memory == stored["head"].memory + stored["target"].memory
    settings = recipe(eight).train
    passes = 2 * 8.03e9 * settings.steps * settings.batch_rows * settings.row_tokens / 989e12
    more = online["head"].seconds - stored["head"].seconds
    assert more == pytest.approx(passes, rel=0.01)


def test_prompts_of_unknown_number(eight: Path, tmp_path: Path) -> None:
    asked = recipe(eight, prompts={"source": "no.jsonl"})
    lines = list(estimate(asked, tmp_path, STAGES))
    assert "unknown: no.jsonl is not there, and prompts.max_prompts not given" in lines[3]
    assert "32.8 kB a token" in lines[4]
    online = recipe(eight, prompts={"source": "no.jsonl"}, record={"online": True})
    for known in (
        lines,
        estimate(asked, tmp_path, ("answers",)),
        estimate(online, tmp_path, STAGES),
    ):
        (total,) = (line for line in known if line.startswith("  in all"))
        assert total.endswith(", and what is unknown")
    (total,) = (x for x in estimate(recipe(eight), tmp_path, STAGES) if x.startswith("  in all"))
    assert "unknown" not in total


def test_answers_that_have_no_room_are_not_called_given(eight: Path, tmp_path: Path) -> None:
    LlamaConfig(**LLAMA_8B | {"max_position_embeddings": 200}).save_pretrained(tmp_path)
    for asked, said in (
        (recipe(tmp_path), "1,000 conversations whose prompts leave no room"),
        (recipe(eight, regenerate={"enabled": False}), "1,000 conversations, their answers given"),
    ):
        (answers,) = (need for need in needs(asked) if need.name == "answers")
        assert answers.about.startswith(said)


def test_what_does_not_fit_is_said(eight: Path, tmp_path: Path) -> None:
    small = recipe(eight, hardware={"gpu": "RTX4090"}, regenerate={"batch": 256})
    lines = "\n".join(estimate(small, tmp_path, STAGES))
    assert "the target and its keys take" in lines
    assert "target.gpus=2 would do" in lines or "target.gpus=3 would do" in lines
    assert "warning: training takes" in lines
    spread = recipe(eight, target={"gpus": 4}, hardware={"gpu": "L40S", "gpus": 2})
    lines = "\n".join(estimate(spread, tmp_path, STAGES))
    assert "target.gpus is 4, and hardware.gpus 2" in lines
    assert "4.02 GB × 4" in lines
    many = recipe(eight, prompts={"source": "no.jsonl", "max_prompts": 10**12})
    assert "of disk are free here" in "\n".join(estimate(many, tmp_path, STAGES))


def shipped() -> list[Path]:
    return sorted(RECIPES.glob("*.yaml"))


@pytest.mark.parametrize("path", shipped(), ids=lambda p: p.stem)
def test_every_recipe_plans_from_a_config_alone(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No weights, no tokenizer, no prompts, no Hub; and no run folder is left behind."""

    def never(*_: object) -> None:
        raise AssertionError("a plan fetched the target")

    monkeypatch.setattr(pipeline, "resolve_target", never)
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    kind = "llama4" if "llama4" in path.stem else "gpt_oss" if "gpt_oss" in path.stem else "llama"
    zoo_config(kind, num_hidden_layers=48, no_rope_layers=None).save_pretrained(tmp_path / "t")
    result = draftlab(tmp_path, "train", str(path), f"target={tmp_path / 't'}", "--plan")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("estimate ("))
    assert [line.split()[0] for line in lines[start + 2 : start + 6]] == [
        "target", "answers", "store", "head",
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()
    if load_recipe(path).target.path != "embedded":
        assert load_recipe(path).hardware.gpu, "a recipe for a large target names its hardware"


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr("draftlab.pipeline.head_spec.AutoConfig.from_pretrained", offline)
    file = tmp_path / "r.yaml"
    file.write_text("target: nobody/nothing-at-all\n")
    result = draftlab(tmp_path, "train", str(file), "--plan")
    assert result.exit_code == 2
    assert "the target's config does not load: no route" in result.output
    assert "where: nobody/nothing-at-all" in result.output
    assert "do: check the id, your network and your login" in result.output
