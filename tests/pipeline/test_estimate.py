"""Estimates of `--plan` from the target's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4Config, LlamaConfig

from draftlab.files import write_json
from draftlab.formatting import size_text
from draftlab.pipeline import pipeline
from draftlab.pipeline.estimate import CHECKPOINTS, estimate_stages
from draftlab.pipeline.estimate_table import _shared, estimate_table
from draftlab.pipeline.hardware import GPUS
from draftlab.pipeline.head_spec import planned_head, target_config
from draftlab.pipeline.recipe import Recipe, load_recipe, parse_recipe
from draftlab.pipeline.sizes import Conversations, HeadSize, TargetSize
from draftlab.pipeline.stages import STAGES
from draftlab.store.manifest import StoreIdentity
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from draftlab.text.prompts import EMBEDDED_PROMPTS
from draftlab.train import checkpoint
from tests.helpers.small_run import RECIPES, draftlab, write_prompts
from tests.helpers.zoo import zoo_config, zoo_folder

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
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the config.json of Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(**LLAMA_8B).save_pretrained(folder)
    return folder


def recipe(folder: Path, **settings: Any) -> Recipe:
    """Return a recipe for the target in a folder."""
    target = {"path": str(folder), "dtype": "bfloat16"} | settings.pop("target", {})
    return parse_recipe(RECIPE | {"target": target} | settings)


def test_several_nodes_share_the_times_and_the_bottleneck_is_named(
    llama_8b: Path, tmp_path: Path
) -> None:
    settings = recipe(
        llama_8b,
        hardware={"gpu": "H200", "gpus": 8, "nodes": 4},
        train={"batch_rows": 16, "steps": 20000},
    )
    one = {row.name: row.seconds for row in estimate_stages(settings)}
    shared = {row.name: _shared(row, settings, 32).seconds for row in estimate_stages(settings)}
    for name, share in (("answers", 32), ("store", 32), ("head", 16), ("eval", 1)):
        assert shared[name] == pytest.approx(one[name] / share)
    halves = recipe(llama_8b, target={"gpus": 8}, hardware={"gpu": "H200"})
    (row,) = (row for row in estimate_stages(halves) if row.name == "store")
    assert _shared(row, halves, 32).seconds == pytest.approx(row.seconds / 4)
    lines = "\n".join(estimate_table(settings, tmp_path, list(STAGES), 32))
    assert "estimate (4 × 8 × H200; 32 work together)" in lines
    assert "bottleneck: head takes " in lines
    store = next(row for row in estimate_stages(settings) if row.name == "store")
    rate = store.disk / (2 * shared["store"])
    assert f"file system: up to writing {size_text(rate)}/s, then reading " in lines
    alone = "\n".join(estimate_table(settings, tmp_path, list(STAGES)))
    assert "bottleneck" not in alone
    arguments = ("run", "r.yaml", "--plan", "hardware={gpu: H200, gpus: 8, nodes: 4}")
    (tmp_path / "r.yaml").write_text(f"target: {llama_8b}\nprompts: {{source: embedded}}\n")
    assert "32 work together" in draftlab(tmp_path, *arguments, "--ray", "auto").output


def test_a_targets_size(llama_8b: Path) -> None:
    settings = recipe(llama_8b)
    size = TargetSize.of(settings, target_config(settings.target))
    assert size.parameters == size.active == 8_030_261_248
    assert size.kv_bytes == 2 * 32 * 8 * 128 * 2
    # One row is bound by reading the weights, many rows by matrix products.
    h200 = GPUS["H200"]
    assert size.step_seconds(h200, 1, 0) == pytest.approx(16.06e9 / 4.8e12, rel=0.01)
    assert size.step_seconds(h200, 4096, 0) == pytest.approx(2 * 8.03e9 * 4096 / 989e12, rel=0.01)


@pytest.mark.parametrize("kind", ["llama", "llama4", "gpt_oss", "qwen3_moe"])
def test_parameters_are_those_of_the_loaded_target(kind: str, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind)
    model = load_target(TargetSettings(path=str(folder), device="cpu")).model
    settings = recipe(folder)
    size = TargetSize.of(settings, target_config(settings.target))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    text = zoo_config(kind).get_text_config()
    per_token = getattr(text, "num_experts_per_tok", 1)
    assert (size.active < size.parameters) == (kind != "llama")
    assert size.active_share == (
        1.0 if kind == "llama" else per_token / (8 if kind == "qwen3_moe" else 4)
    )


def test_scout_and_maverick(tmp_path: Path) -> None:
    """Their published sizes: 17 B of 109 B and of 400 B parameters, vision included."""
    for name, text, total in (
        ("scout", {}, 108e9),
        ("maverick", {"num_local_experts": 128, "interleave_moe_layer_step": 2}, 401e9),
    ):
        Llama4Config(text_config=text).save_pretrained(tmp_path / name)
        settings = recipe(tmp_path / name)
        size = TargetSize.of(settings, target_config(settings.target))
        assert size.parameters == pytest.approx(total, rel=0.01)
        assert size.active == pytest.approx(17.2e9, rel=0.01)


def test_a_quantised_target(tmp_path: Path) -> None:
    """Sizes are those of 16 bits; the note says that the files are smaller."""
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    LlamaConfig(**LLAMA_8B, **quantised).save_pretrained(tmp_path)
    (line,) = (row.note for row in estimate_stages(recipe(tmp_path)) if row.name == "target")
    assert line.startswith("LlamaForCausalLM: 8.03 B parameters; quantised")


def head_size(settings: Recipe) -> HeadSize:
    identity = StoreIdentity("t", "", "", "", (2, 16, 29), 32, 4096, 128256, settings.record.dtype)
    return HeadSize.of(planned_head(settings, target_config(settings.target), identity), settings)


def test_training_an_8b_head(llama_8b: Path) -> None:
    """methods §2: 425 M parameters trained, 17.3 GFLOP a position, TTT 7."""
    train = {"ttt_steps": 7, "batch_rows": 4, "row_tokens": 2048}
    size = head_size(recipe(llama_8b, draft_vocab={"size": 32000}, train=train))
    assert size.trained == pytest.approx(425e6, rel=0.01)
    assert size.flops == pytest.approx(17.3e9, rel=0.01)
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
    assert 250 < measured.prompt < 300
    write_prompts(tmp_path / "p.jsonl", [*["a" * 1000] * 97, *["a" * 40_000] * 3])
    prompts = {"source": str(tmp_path / "p.jsonl")}
    mixed = Conversations.of(recipe(llama_8b, prompts=prompts), 131_072)
    assert 500 < mixed.prompt < 1500
    assert 10_000 < mixed.long_prompt < 10_100
    settings = recipe(llama_8b, prompts=prompts, regenerate={"max_new_tokens": 500, "batch": 64})
    answers = estimate_stages(settings)[1]
    positions = mixed.long_prompt + 500  # a batch may meet the long prompts
    assert answers.memory == pytest.approx(64 * positions * 131_072)
    assert f"KV cache of {positions:,.0f} positions for each of a batch" in answers.note
    cut = Conversations.of(recipe(llama_8b), 300)
    assert (cut.prompt, cut.answer) == (256, 44)
    with_answers = Conversations.of(recipe(llama_8b, regenerate={"enabled": False}), 4096)
    assert with_answers.answer == 0


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
    assert Conversations.of(settings, 131_072).answer == 3 * 200
    assert Conversations.longest(settings) == pytest.approx(6 * 200 + len(lines[-1]) / 4)
    assert "at most 1,800 tokens to generate" in estimate_stages(settings)[1].note
    table = "\n".join(estimate_table(settings, tmp_path, STAGES))
    assert re.search("longest conversation may have about 1,[34]", table)


def test_the_disk_holds_the_checkpoints_that_there_are_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    def counted(path: Path, value: object) -> None:
        write_json(path, value)
        counts.append(len(list(tmp_path.rglob(checkpoint.MOMENTS))))

    monkeypatch.setattr(checkpoint, "write_json", counted)
    tensors = {"weight": torch.zeros(1)}
    for step in range(1, 6):
        written = checkpoint.Checkpoint(step, 0, "key", tensors, tensors, True)
        checkpoint.save_checkpoint(tmp_path, written)
    assert max(counts) == CHECKPOINTS


def test_the_table(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(
        llama_8b,
        hardware={"gpu": "H200"},
        record={"boundaries": [1, 20]},
        draft_vocab={"size": 1000},
    )
    by_name = {row.name: row for row in estimate_stages(settings)}
    assert list(by_name) == ["target", "answers", "store", "head", "eval"]
    tokens = 1000 * (256 + settings.regenerate.max_new_tokens)
    assert by_name["store"].disk == tokens * (2 * 3 * 4096 + 16)
    trained = head_size(settings).trained  # of three boundaries: 4096² more
    assert by_name["head"].disk == (CHECKPOINTS * 12 + 2) * (trained - 4096**2)
    lines = list(estimate_table(settings, tmp_path / "runs", STAGES))
    assert lines[0].startswith("estimate (1 × H200)")
    assert "LlamaForCausalLM: 8.03 B parameters" in lines[2]
    assert "256 tokens per prompt: there is no not-there.jsonl" in lines[3]
    assert lines[4].endswith("tokens of 24.6 kB, boundaries [1, 20] and the last state")
    assert lines[7].split()[:1] == ["total"]
    assert not any("minutes" in line for line in estimate_table(recipe(llama_8b), tmp_path, STAGES))
    compared = recipe(
        llama_8b, eval={"k": [3, 5], "temperatures": [0, 1], "compare": ["reference"]}
    )
    assert estimate_stages(compared)[-1].note.startswith("14 rows ")  # 1 + 2 · 2, and 1 + 2 · 2 · 2


def test_measurements_under_load_take_time(llama_8b: Path) -> None:
    def seconds(**settings: object) -> float:
        settings = {"temperatures": 0, "timing_prompts": 0, "k": 3} | settings
        recipe_ = recipe(llama_8b, hardware={"gpu": "H200"}, eval=settings)
        return estimate_stages(recipe_)[-1].seconds

    base = seconds()
    one, many = (seconds(concurrency=c) - base for c in (1, 64))
    # plain decoding and K = 3; in each of two rounds two answers, half a start and the end
    step = TargetSize.of(recipe(llama_8b), target_config(recipe(llama_8b).target)).step_seconds(
        GPUS["H200"], 1, 256
    )
    assert one == pytest.approx(2 * 2 * (2 + 1.5) * 64 * step, rel=0.2)
    assert one < many < 3 * one
    assert seconds(concurrency=[1, 64]) == pytest.approx(base + one + many)
    with_adaptive = seconds(concurrency=1, adaptive=True) - base  # a third configuration
    assert with_adaptive == pytest.approx(1.5 * one)


def test_conversations_are_truncated_in_the_store_and_not_when_answered(
    llama_8b: Path, tmp_path: Path
) -> None:
    for positions, max_length, stored in (
        (4096, None, 384),
        (4096, 200, 200),
        (300, None, 300),
        (300, 4096, 300),
    ):
        LlamaConfig(**LLAMA_8B | {"max_position_embeddings": positions}).save_pretrained(tmp_path)
        rows = estimate_stages(recipe(tmp_path, record={"max_length": max_length}))
        by_name = {row.name: row for row in rows}
        tokens = 1000 * (min(384, positions) - 256)
        assert f"at most {tokens:,} tokens to generate" in by_name["answers"].note
        assert by_name["store"].disk == 1000 * stored * (4 * 2 * 4096 + 16)
        limited = "conversations of at most the target's 300 positions" in by_name["store"].note
        assert limited == (max_length == 4096)


def test_positions_of_longrope_are_those_that_the_target_supports(tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, "phi3")
    settings = recipe(folder)
    used = load_target(TargetSettings(path=str(folder), device="cpu")).max_length
    assert TargetSize.of(settings, target_config(settings.target)).max_length == used
    assert used < zoo_config("phi3").max_position_embeddings


def test_online_recording_stores_nothing_and_needs_the_target_in_training(llama_8b: Path) -> None:
    h200 = {"gpu": "H200"}
    stored, online = (
        {
            row.name: row
            for row in estimate_stages(recipe(llama_8b, record={"online": way}, hardware=h200))
        }
        for way in (False, True)
    )
    assert stored["store"].disk
    assert online["store"].disk is None
    assert online["head"].memory == stored["head"].memory + stored["target"].memory
    train = recipe(llama_8b).train
    passes = 2 * 8.03e9 * train.steps * train.batch_rows * train.row_tokens / 989e12
    more = online["head"].seconds - stored["head"].seconds
    assert more == pytest.approx(passes, rel=0.01)


@pytest.mark.parametrize(
    ("gpus", "target_gpus", "is_shared"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False)]
)
def test_a_window_needs_the_target_in_training_if_no_gpu_is_left_to_record(
    llama_8b: Path, gpus: int, target_gpus: int, is_shared: bool
) -> None:
    machine = {"target": {"gpus": target_gpus}, "hardware": {"gpu": "H200", "gpus": gpus}}
    full, window = (
        {row.name: row for row in estimate_stages(recipe(llama_8b, record=record, **machine))}
        for record in ({}, {"window": "200GB"})
    )
    beside = full["target"].memory if is_shared else 0
    assert window["head"].memory == full["head"].memory + beside
    assert ("the GPU that records the window" in window["head"].note) is is_shared


def test_replay_needs_the_target_and_time_in_training(llama_8b: Path) -> None:
    h200 = {"gpu": "H200"}
    plain, replay = (
        {row.name: row for row in estimate_stages(recipe(llama_8b, train=train, hardware=h200))}
        for train in ({}, {"replay": {"start": 0.5, "share": 0.5}})
    )
    assert replay["head"].memory == plain["head"].memory + plain["target"].memory
    train = recipe(llama_8b).train
    replayed = 0.25 * train.steps * train.batch_rows * train.row_tokens
    assert "replayed, with the target in memory" in replay["head"].note
    least = 2 * 8.03e9 * replayed / 989e12  # the conversations alone
    assert replay["head"].seconds - plain["head"].seconds > least


def test_prompts_of_unknown_number(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(llama_8b, prompts={"source": "no.jsonl"})
    lines = list(estimate_table(settings, tmp_path, STAGES))
    assert "unknown: there is no no.jsonl, and prompts.max_prompts is not set" in lines[3]
    assert "32.8 kB per token" in lines[4]
    online = recipe(llama_8b, prompts={"source": "no.jsonl"}, record={"online": True})
    for known in (
        lines,
        estimate_table(settings, tmp_path, ("answers",)),
        estimate_table(online, tmp_path, STAGES),
    ):
        (total,) = (line for line in known if line.startswith("  total"))
        assert total.endswith(", and what is unknown")
    (total,) = (
        x for x in estimate_table(recipe(llama_8b), tmp_path, STAGES) if x.startswith("  total")
    )
    assert "unknown" not in total


def test_prompts_without_room_for_answers(llama_8b: Path, tmp_path: Path) -> None:
    LlamaConfig(**LLAMA_8B | {"max_position_embeddings": 200}).save_pretrained(tmp_path)
    for settings, note in (
        (recipe(tmp_path), "1,000 conversations whose prompts leave no room"),
        (recipe(llama_8b, regenerate={"enabled": False}), "1,000 conversations with answers"),
    ):
        (answers,) = (row for row in estimate_stages(settings) if row.name == "answers")
        assert answers.note.startswith(note)


def test_warnings_about_memory_and_disk(llama_8b: Path, tmp_path: Path) -> None:
    small = recipe(llama_8b, hardware={"gpu": "RTX4090"}, regenerate={"batch": 256})
    lines = "\n".join(estimate_table(small, tmp_path, STAGES))
    assert "the target and its KV cache take" in lines
    assert re.search("target.gpus=[23] is enough", lines)
    assert "warning: training takes" in lines
    spread = recipe(llama_8b, target={"gpus": 4}, hardware={"gpu": "L40S", "gpus": 2})
    lines = "\n".join(estimate_table(spread, tmp_path, STAGES))
    assert "target.gpus is 4, and hardware.gpus 2" in lines
    assert "4.02 GB × 4" in lines
    many = recipe(llama_8b, prompts={"source": "no.jsonl", "max_prompts": 10**12})
    assert "of disk are free" in "\n".join(estimate_table(many, tmp_path, STAGES))


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_recipe_can_be_planned_from_a_config(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan needs no weights, tokenizer, prompts or Hub, and writes no run folder.

    Its exit code says whether the prompts are missing.
    """

    def never(*_: object) -> None:
        raise AssertionError("the plan downloaded the target")

    monkeypatch.setattr(pipeline, "resolve_target", never)
    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    kind = "llama4" if "llama4" in path.stem else "gpt_oss" if "gpt_oss" in path.stem else "llama"
    zoo_config(kind, num_hidden_layers=48, no_rope_layers=None, vocab_size=40_000).save_pretrained(
        tmp_path / "t"
    )
    result = draftlab(tmp_path, "train", str(path), f"target={tmp_path / 't'}", "--plan")
    missing = load_recipe(path).prompts.source not in EMBEDDED_PROMPTS
    assert result.exit_code == (2 if missing else 0), result.output
    lines = result.output.splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith("estimate ("))
    assert [line.split()[0] for line in lines[start + 2 : start + 6]] == [
        "target", "answers", "store", "head",
    ]  # fmt: skip
    assert not (tmp_path / "runs").exists()
    if load_recipe(path).target.path != "embedded":
        assert load_recipe(path).hardware.gpu, "a recipe for a large target names its hardware"


@pytest.mark.parametrize(
    ("window", "warning"),
    [
        ("1MB", "record.window is 1 MB, and four shards"),
        ("30MB", "half of record.window, 15 MB, may not hold an optimizer step"),
        ("200MB", None),
    ],
)
def test_a_window_that_would_be_refused_is_warned_of(
    window: str, warning: str | None, tmp_path: Path
) -> None:
    tree = {
        "target": "embedded",
        "record": {"shard_tokens": 1024, "window": window},
        "train": {"batch_rows": 4, "row_tokens": 2048},
    }
    lines = estimate_table(parse_recipe({"name": "small", **tree}), tmp_path, ["store", "head"])
    warnings = [line for line in lines if "warning: " in line and "record.window" in line]
    assert (warning in warnings[0]) if warning else not warnings
