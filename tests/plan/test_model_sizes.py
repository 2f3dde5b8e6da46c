"""Sizes of targets, heads and conversations, from configs and prompts alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import Llama4Config

from draftlab.plan.estimate import RecipeSizes, estimate_table
from draftlab.plan.model_sizes import Conversations, TargetSize
from draftlab.recipe.head_spec import planned_head, planned_identity, target_config
from draftlab.run.stages import STAGES
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import prompt_ids
from tests.helpers.estimates import head_size, recipe
from tests.helpers.multimodal_zoo import random_folder
from tests.helpers.small_run import write_prompts
from tests.helpers.zoo import zoo_config, zoo_folder


@pytest.mark.parametrize("kind", ["llama", "llama4", "gpt_oss", "qwen3_moe"])
def test_parameters_are_those_of_the_loaded_target(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    model = load_target(TargetSettings(path=str(folder), device="cpu")).model
    settings = recipe(folder)
    size = TargetSize(settings, target_config(settings.target))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    text = zoo_config(kind).get_text_config()
    per_token = getattr(text, "num_experts_per_tok", 1)
    assert (size.active < size.parameters) == (kind != "llama")
    assert size.active_share == (
        1.0 if kind == "llama" else per_token / (8 if kind == "qwen3_moe" else 4)
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "deepseek_v3"])
def test_the_cache_of_a_token_is_that_of_the_loaded_target(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    settings = recipe(folder)
    size = TargetSize(settings, target_config(settings.target))
    assert 4 * size.kv_bytes == sum(target.kv_bytes.values()) * size.bytes / size.parameters


def test_scout_and_maverick(tmp_path: Path) -> None:
    """Their published sizes: 17 B of 109 B and of 400 B parameters, vision included."""
    for name, text, total in (
        ("scout", {}, 108e9),
        ("maverick", {"num_local_experts": 128, "interleave_moe_layer_step": 2}, 401e9),
    ):
        Llama4Config(text_config=text).save_pretrained(tmp_path / name)
        settings = recipe(tmp_path / name)
        size = TargetSize(settings, target_config(settings.target))
        assert size.parameters == pytest.approx(total, rel=0.01)
        assert size.active == pytest.approx(17.2e9, rel=0.01)


def test_training_an_8b_head(llama_8b: Path) -> None:
    """methods §2: 425 M parameters trained, 16.5 GFLOP a position, TTT 7."""
    train = {"ttt_steps": 7, "batch_rows": 4, "row_tokens": 2048}
    size = head_size(recipe(llama_8b, draft_vocab={"size": 32000}, train=train))
    assert size.trained == pytest.approx(425e6, rel=0.01)
    assert size.flops == pytest.approx(16.5e9, rel=0.01)
    assert 15e9 < size.memory < 36e9  # measured on GPUs
    smaller = head_size(
        recipe(llama_8b, draft_vocab={"size": 32000}, train=train | {"micro_rows": 1})
    )
    assert smaller.memory < size.memory
    assert smaller.flops == size.flops
    parallel = train | {"ttt_steps": 8, "cod_ratio": 0.8, "cod_min": 0.2}
    dropped, whole = (
        head_size(
            recipe(
                llama_8b, draft_vocab={"size": 32000}, head={"family": "peagle"}, train=parallel | c
            )
        )
        for c in ({}, {"cod_ratio": 1.0})
    )
    assert dropped.flops / whole.flops == pytest.approx(34_088 / 65_536, rel=0.1)


def test_conversations_are_measured_or_assumed(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(llama_8b, regenerate={"max_new_tokens": 100, "samples": 2})
    assumed = Conversations.of(settings, 4096)
    assert (assumed.count, assumed.length, assumed.assumed) == (2000, 356, True)
    write_prompts(tmp_path / "p.jsonl", ["a" * 1000] * 7)
    prompts = {"source": str(tmp_path / "p.jsonl"), "max_prompts": 5}
    measured = Conversations.of(recipe(llama_8b, prompts=prompts), 4096)
    assert (measured.count, measured.assumed) == (5, False)
    assert measured.prompt == 250
    write_prompts(tmp_path / "p.jsonl", [*["a" * 1000] * 97, *["a" * 40_000] * 3])
    prompts = {"source": str(tmp_path / "p.jsonl")}
    mixed = Conversations.of(recipe(llama_8b, prompts=prompts), 131_072)
    assert 500 < mixed.prompt < 1500
    assert mixed.long_prompt == 10_000
    settings = recipe(llama_8b, prompts=prompts, regenerate={"max_new_tokens": 500, "batch": 64})
    answers = RecipeSizes(settings).stages()[1]
    positions = mixed.prompt + 500  # requests wait if a batch has more
    assert answers.memory == pytest.approx(64 * positions * 131_072)
    assert f"KV cache of {positions:,.0f} positions on average for each of a batch" in answers.note
    cut = Conversations.of(recipe(llama_8b), 300)
    assert (cut.prompt, cut.answer) == (256, 44)
    with_answers = Conversations.of(recipe(llama_8b, regenerate={"enabled": False}), 4096)
    assert with_answers.answer == 0


def test_a_tokenizer_that_is_here_counts_what_its_template_adds(tmp_path: Path) -> None:
    texts = [f"Write {n} short functions." for n in range(10)]
    write_prompts(tmp_path / "p.jsonl", texts)
    prompts = {"source": str(tmp_path / "p.jsonl")}
    settings = recipe(Path("embedded"), prompts=prompts)
    tokenizer = load_tokenizer(settings.target)
    real = [len(prompt_ids(tokenizer, [{"role": "user", "content": text}])) for text in texts]
    assert Conversations.of(settings, 4096).prompt == pytest.approx(sum(real) / len(real))


def test_every_turn_of_a_conversation_has_an_answer(llama_8b: Path, tmp_path: Path) -> None:
    """Plans are an upper bound, so that a run of several turns fits the planned disk."""
    turn = [{"role": "user", "content": 'the "user" asks'}, {"role": "assistant", "content": "?"}]
    lines = [json.dumps({"id": str(n), "messages": turn * n}) + "\n" for n in (1, 2, 6)]
    (tmp_path / "p.jsonl").write_text("".join(lines))
    settings = recipe(
        llama_8b,
        prompts={"source": str(tmp_path / "p.jsonl")},
        regenerate={"max_new_tokens": 200},
        train={"row_tokens": 1024},
    )
    measured = Conversations.of(settings, 131_072)
    assert measured.answer == 3 * 200
    assert measured.longest == pytest.approx(6 * 200 + 6 * len('the "user" asks') / 4)
    assert "at most 1,800 tokens to generate" in RecipeSizes(settings).stages()[1].note
    table = "\n".join(estimate_table(settings, tmp_path, STAGES))
    assert "longest conversation may have about 1,2" in table


def test_answers_and_token_ids_of_a_line_are_no_prompts(llama_8b: Path, tmp_path: Path) -> None:
    user, said = ({"role": r, "content": x * 400} for r, x in (("user", "a"), ("assistant", "b")))
    ids = {"prompt_ids": [1] * 100, "token_ids": [2] * 100, "finish": "stop"}
    lines = {"messages": [user]}, {"messages": [user, said], "temperature": 0, "answers": [ids]}
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prompts = {"source": str(tmp_path / "p.jsonl")}
    answered = Conversations.of(recipe(llama_8b, prompts=prompts), 131_072)
    assert (answered.prompt, answered.long_prompt) == (100, 100)
    given = recipe(llama_8b, prompts=prompts, regenerate={"enabled": False})
    kept = Conversations.of(given, 131_072)
    assert (kept.prompt, kept.asked) == (150, 100)
    assert kept.loss_share == 0.5, "a line without an answer is dropped"


def test_many_lines_are_measured_in_part(
    llama_8b: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftlab.plan.model_sizes.MOST_MEASURED", 10)
    write_prompts(tmp_path / "p.jsonl", [*["a" * 1000] * 55, "a" * 40_000, *["a" * 1000] * 44])
    settings = recipe(llama_8b, prompts={"source": str(tmp_path / "p.jsonl")})
    found = Conversations.of(settings, 131_072)
    assert found.count == 100
    assert found.longest == 10_000 + settings.regenerate.max_new_tokens


def test_prompts_carry_no_loss(llama_8b: Path, tmp_path: Path) -> None:
    """The target's products and those of later steps are of answers alone."""
    write_prompts(tmp_path / "p.jsonl", ["a" * 36_000] * 10)
    settings = recipe(
        llama_8b,
        prompts={"source": str(tmp_path / "p.jsonl")},
        regenerate={"max_new_tokens": 1000},
        train={"ttt_steps": 7, "row_tokens": 16_384},
    )
    sizes, every = RecipeSizes(settings), head_size(settings)
    assert sizes.conversations.loss_share == pytest.approx(0.1)
    assert sizes.head.flops < 0.3 * every.flops
    assert sizes.head.memory < 0.7 * every.memory
    cut = recipe(llama_8b, prompts=settings.prompts, record={"max_length": 9500})
    assert RecipeSizes(cut).conversations.loss_share == pytest.approx(500 / 9500)


def test_turns_that_are_cut_have_answers_among_them(llama_8b: Path, tmp_path: Path) -> None:
    user, said = ({"role": r, "content": x * 4000} for r, x in (("user", "a"), ("assistant", "b")))
    line = json.dumps({"messages": [user, said] * 6}) + "\n"
    (tmp_path / "p.jsonl").write_text(line * 3)
    shared = {"prompts": {"source": str(tmp_path / "p.jsonl")}, "record": {"max_length": 4000}}
    for regenerate in ({"max_new_tokens": 1000}, {"enabled": False}):
        found = Conversations.of(recipe(llama_8b, regenerate=regenerate, **shared), 131_072)
        assert (found.loss_share, found.most_loss_share) == (0.5, 0.5)


def test_prompts_of_unknown_length_save_no_memory(llama_8b: Path, tmp_path: Path) -> None:
    """They may be much shorter than assumed, and a training that runs out of memory ends late."""
    write_prompts(tmp_path / "p.jsonl", ["a" * 36_000] * 10)
    shared = {"regenerate": {"max_new_tokens": 1000}, "hardware": {"gpu": "H200"}}
    for prompts in (
        {"source": "not-there.jsonl", "max_prompts": 10},
        {"source": "self", "max_prompts": 10},
        {"source": str(tmp_path / "p.jsonl"), "self_written": 30},
    ):
        settings = recipe(llama_8b, prompts=prompts, **shared)
        assert RecipeSizes(settings).head.memory == head_size(settings).memory
    mixed = Conversations.of(settings, 131_072)
    assert (mixed.count, mixed.prompt) == (40, (10 * 9000 + 30 * 256) / 40)
    assert mixed.loss_share == pytest.approx(40_000 / (10 * 10_000 + 30 * 1256))


def test_positions_of_longrope_are_those_that_the_target_supports(tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, "phi3")
    settings = recipe(folder)
    used = load_target(TargetSettings(path=str(folder), device="cpu")).max_length
    assert TargetSize(settings, target_config(settings.target)).max_length == used
    assert used < zoo_config("phi3").max_position_embeddings


def test_layers_of_two_widths_keep_keys_of_two_widths(tmp_path: Path) -> None:
    folder = random_folder(tmp_path, "gemma4_text")
    settings = recipe(folder, target={"dtype": "float32"})
    target = load_target(TargetSettings(path=str(folder), device="cpu"))
    size = TargetSize(settings, target_config(settings.target))
    assert size.kv_bytes == sum(target.kv_bytes.values()) == 2 * 4 * 2 * (3 * 16 + 32)
    head = planned_head(settings, target.config, planned_identity(settings, target.config))
    assert head.config.head_dim == 16
