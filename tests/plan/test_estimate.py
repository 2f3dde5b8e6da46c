"""The estimates of `--plan` from a config.json: rows of the stages, table and warnings."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from draftlab.files import write_json, write_text
from draftlab.plan.estimate import (
    CHECKPOINTS,
    RecipeSizes,
    _shared,
    estimate_table,
    predicted_seconds,
)
from draftlab.recipe.recipe import load_recipe, parse_recipe, to_yaml
from draftlab.run.stages import STAGES, recorded
from draftlab.train import checkpoint
from tests.helpers.estimates import LLAMA_8B, head_size, recipe
from tests.helpers.small_run import RECIPES, draftlab, write_prompts


@pytest.mark.parametrize(
    ("fields", "disk", "memory"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 6.0e9, 16.1e9),
        ({"quant_method": "gptq", "bits": 4}, 6.0e9, 6.0e9),
        ({"quant_method": "fp8"}, 9.1e9, 16.1e9),
    ],
)
def test_a_quantised_target(
    fields: dict[str, Any], disk: float, memory: float, tmp_path: Path
) -> None:
    LlamaConfig(**LLAMA_8B, quantization_config=fields).save_pretrained(tmp_path)
    settings = recipe(tmp_path, hardware={"gpu": "H200"})
    (row,) = (row for row in RecipeSizes(settings).stages() if row.name == "target")
    assert row.note.startswith("LlamaForCausalLM: 8.03 B parameters; quantised")
    assert ("dequantised in memory" in row.note) == (memory > 16e9)
    assert row.disk == pytest.approx(disk, rel=0.02)
    assert row.memory == pytest.approx(memory, rel=0.02)


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
        answers = {"max_new_tokens": 128}
        record = {"max_length": max_length}
        rows = RecipeSizes(recipe(tmp_path, record=record, regenerate=answers)).stages()
        by_name = {row.name: row for row in rows}
        tokens = 1000 * (min(384, positions) - 256)
        assert f"at most {tokens:,} tokens to generate" in by_name["answers"].note
        assert by_name["store"].disk == 1000 * stored * (4 * 2 * 4096 + 16)
    one = recipe(tmp_path, prompts={"source": "self", "max_prompts": 1}, eval={"max_prompts": 1})
    by_name = {row.name: row for row in RecipeSizes(one).stages()}
    assert by_name["answers"].note.startswith("1 conversation,")
    assert by_name["eval"].note.endswith(" 1 prompt")


@pytest.mark.parametrize(
    ("gpus", "target_gpus", "is_shared"), [(1, 1, True), (2, 1, False), (2, 2, True), (3, 2, False)]
)
def test_a_window_needs_the_target_in_training_if_no_gpu_is_left_to_record(
    llama_8b: Path, gpus: int, target_gpus: int, is_shared: bool
) -> None:
    machine = {"target": {"gpus": target_gpus}, "hardware": {"gpu": "H200", "gpus": gpus}}
    full, window = (
        {row.name: row for row in RecipeSizes(recipe(llama_8b, record=record, **machine)).stages()}
        for record in ({}, {"window": "200GB"})
    )
    beside = full["target"].memory if is_shared else 0
    assert window["head"].memory == full["head"].memory + beside
    assert ("the device that records the window" in window["head"].note) is is_shared


def test_several_nodes_share_the_times(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(
        llama_8b,
        hardware={"gpu": "H200", "gpus": 8, "nodes": 4},
        train={"batch_rows": 16, "steps": 20000},
    )
    one = {row.name: row.seconds for row in RecipeSizes(settings).stages()}
    shared = {
        row.name: _shared(row, settings, 32).seconds for row in RecipeSizes(settings).stages()
    }
    for name, share in (("answers", 32), ("store", 32), ("head", 16), ("eval", 1)):
        assert shared[name] == pytest.approx(one[name] / share)
    halves = recipe(llama_8b, target={"gpus": 8}, hardware={"gpu": "H200"})
    (row,) = (row for row in RecipeSizes(halves).stages() if row.name == "store")
    assert _shared(row, halves, 32).seconds == pytest.approx(row.seconds / 4)
    lines = "\n".join(estimate_table(settings, tmp_path, list(STAGES), 32))
    assert "estimate (4 × 8 × H200; 32 work together)" in lines
    arguments = ("run", "r.yaml", "--plan", "hardware={gpu: H200, gpus: 8, nodes: 4}")
    (tmp_path / "r.yaml").write_text(f"target: {llama_8b}\nprompts: {{source: embedded}}\n")
    assert "32 work together" in draftlab(tmp_path, *arguments, "--ray", "127.0.0.1:9").output


def test_the_table(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(
        llama_8b,
        hardware={"gpu": "H200"},
        record={"boundaries": [1, 20]},
        draft_vocab={"size": 1000},
    )
    by_name = {row.name: row for row in RecipeSizes(settings).stages()}
    assert list(by_name) == ["target", "answers", "store", "head", "eval"]
    tokens = 1000 * (256 + settings.regenerate.max_new_tokens)
    assert by_name["store"].disk == tokens * (2 * 3 * 4096 + 16)
    trained = head_size(settings).trained  # of three boundaries: 4096² more
    assert by_name["head"].disk == (CHECKPOINTS * 12 + 2) * (trained - 4096**2)
    lines = list(estimate_table(settings, tmp_path / "runs", STAGES))
    assert lines[0].startswith("estimate (1 × H200)")
    assert lines[7].split()[:1] == ["total"]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "target: LlamaForCausalLM: 8.03 B parameters answers: 1,000 conversations" in text
    assert "256 tokens per prompt: there is no not-there.jsonl" in text
    assert "tokens of 24.6 kB, boundaries [1, 20] and the last state" in text
    assert not any("minutes" in line for line in estimate_table(recipe(llama_8b), tmp_path, STAGES))


def test_the_rows_of_an_evaluation_are_those_that_it_has(llama_8b: Path) -> None:
    def note(**settings: object) -> str:
        return RecipeSizes(recipe(llama_8b, **settings)).stages()[-1].note

    # Of 1,000 prompts training holds 5 % out; T = 0 also has K = 1 and the half.
    assert note() == "7 rows of about 50 prompts"
    assert note(eval={"max_prompts": 7}) == "7 rows of about 7 prompts"
    assert note(eval={"max_prompts": None, "suite": "mt-bench"}) == "7 rows of all prompts"
    assert note(eval={"suite": "mt-bench"}, train={"ttt_steps": 2}) == "6 rows of 64 prompts"
    assert note(eval={"suite": "mt-bench"}, train={"ttt_steps": 1}) == "5 rows of 64 prompts"
    assert note(regenerate={"samples": 3}) == "7 rows of about 50 prompts"


def test_prompts_take_the_time_of_their_prefill(llama_8b: Path, tmp_path: Path) -> None:
    """Answers of one token to prompts of 10,000, in training and in an evaluation."""
    write_prompts(tmp_path / "p.jsonl", ["a" * 40_000] * 100)
    prompts = str(tmp_path / "p.jsonl")
    shared = {"hardware": {"gpu": "H200"}, "regenerate": {"max_new_tokens": 1, "batch": 64}}
    long, short = (
        {row.name: row.seconds for row in RecipeSizes(recipe(llama_8b, **own, **shared)).stages()}
        for own in (
            {"prompts": {"source": prompts}, "eval": {"suite": prompts}},
            {"prompts": {"max_prompts": 100}, "eval": {"suite": "mt-bench"}},
        )
    )
    prefill = 2 * 8.03e9 * 10_000 / 989e12  # seconds of a prompt
    assert long["answers"] > 100 * prefill > 5 * short["answers"]
    assert long["eval"] > short["eval"] + 0.9 * 64 * prefill


def test_prompts_of_unknown_number(llama_8b: Path, tmp_path: Path) -> None:
    settings = recipe(llama_8b, prompts={"source": "no.jsonl"})
    lines = list(estimate_table(settings, tmp_path, STAGES))
    assert "  answers: unknown: there is no no.jsonl, and prompts.max_prompts is not set" in lines
    assert "  store: 32.8 kB per token" in lines
    for known in (lines, estimate_table(settings, tmp_path, ("answers",))):
        (total,) = (line for line in known if line.startswith("  total"))
        assert total.endswith(", and what is unknown")


def test_warnings_about_memory_and_disk(llama_8b: Path, tmp_path: Path) -> None:
    small = recipe(llama_8b, hardware={"gpu": "RTX4090"}, regenerate={"batch": 256})
    lines = " ".join(" ".join(estimate_table(small, tmp_path, STAGES)).split())
    assert "batch (regenerate.batch) does not fit beside the target: some of its requests" in lines
    assert "is enough" not in lines, "the engine lets requests wait"
    assert "warning: training takes" in lines
    long = recipe(llama_8b, hardware={"gpu": "RTX4090"}, regenerate={"max_new_tokens": 100_000})
    lines = " ".join(" ".join(estimate_table(long, tmp_path, STAGES)).split())
    # 16.1 GB and, of 100,256 positions of 131 kB, 13.1 GB with a reserve of a fifth
    found = "the target and the KV cache of its longest request take 32.5 GB of a GPU's 24 GB"
    assert f"{found}; target.gpus=2 is enough" in lines
    spread = recipe(llama_8b, target={"gpus": 4}, hardware={"gpu": "L40S", "gpus": 2})
    lines = "\n".join(estimate_table(spread, tmp_path, STAGES))
    assert "target.gpus is 4, and hardware.gpus 2" in lines
    assert "4.02 GB × 4" in lines
    many = recipe(llama_8b, prompts={"source": "no.jsonl", "max_prompts": 10**12})
    assert "of disk are free" in "\n".join(estimate_table(many, tmp_path, STAGES))


@pytest.mark.parametrize(
    ("window", "warning"),
    [
        ("30MB", "record.window is 30 MB, which may be too small"),
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


def test_a_plan_of_a_cpu_describes_a_cpu(tmp_path: Path) -> None:
    path, prompts = RECIPES / "quickstart.yaml", "prompts.max_prompts=64"
    on_cpu = load_recipe(path, [prompts, "target.device=cpu"])
    on_gpu = load_recipe(path, [prompts, "hardware.gpu=H100"])
    lines = list(estimate_table(on_cpu, tmp_path, STAGES))
    text = "\n".join(lines)
    assert lines[0] == "estimate (a CPU), from the target's config.json:"
    assert "  a CPU's times are not estimated; hardware.gpu=H100 plans for a GPU" in lines
    assert lines[1].split() == ["disk", "memory"]
    assert "GPU memory" not in text
    assert "minute" not in text
    assert "GPU memory" in "\n".join(estimate_table(on_gpu, tmp_path, STAGES))
    # 11 M numbers of 2 bytes on the disk, of 4 in memory, with oneDNN's copy. The run of this
    # recipe took 1.03 GB for answers and 1.04 GB for training.
    target = RecipeSizes(on_cpu).stages()[0]
    assert target.memory == 4 * target.disk == 4 * RecipeSizes(on_gpu).stages()[0].memory
    (memory,) = (line for line in lines if line.startswith("  memory: about "))
    number, unit = memory.replace(",", "").split()[2:4]
    assert 0.8 < float(number) * {"MB": 1e-3, "GB": 1}[unit] < 1.3


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        ((), 215e6),
        (("train.row_tokens=768", "train.batch_rows=3"), 359e6),
        (("train.batch_rows=1", "train.row_tokens=4096"), 1300e6),
    ],
)
def test_the_memory_of_training_on_a_cpu(overrides: tuple[str, ...], measured: float) -> None:
    """Measured: the growth of the process during four steps, without files that it maps."""
    path, few = RECIPES / "quickstart.yaml", "prompts.max_prompts=64"
    sizes = RecipeSizes(load_recipe(path, [few, "target.device=cpu", *overrides]))
    assert sizes.head.memory == pytest.approx(measured, rel=0.2)


def test_a_plan_of_a_cpu_warns_of_too_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = parse_recipe({"name": "r", "target": {"device": "cpu"}})
    warning = "warning: 400 MB of memory are available on this machine"
    assert warning not in "\n".join(estimate_table(settings, tmp_path, STAGES))
    free = SimpleNamespace(available=4e8)
    monkeypatch.setattr("draftlab.plan.estimate.psutil.virtual_memory", lambda: free)
    assert warning in "\n".join(estimate_table(settings, tmp_path, STAGES))


def test_an_earlier_run_tells_how_long_stages_take(tmp_path: Path) -> None:
    settings, stages = parse_recipe({"name": "r", "train": {"steps": 100}}), ["head", "export"]
    assert predicted_seconds(settings, tmp_path, stages, "cpu") is None
    for name in stages:
        with recorded(tmp_path / "old", STAGES[name], {}, devices="1 × GPU"):
            pass
        record = tmp_path / "old/stages" / f"{name}.json"
        assert 0 <= json.loads(record.read_text())["seconds"] < 10
        write_json(record, json.loads(record.read_text()) | {"seconds": 10})
    write_text(tmp_path / "old/recipe.yaml", to_yaml(settings))
    longer = parse_recipe({"name": "r", "train": {"steps": 300}})
    assert predicted_seconds(longer, tmp_path, stages, "1 × GPU") == (pytest.approx(40), "old")
    assert predicted_seconds(longer, tmp_path, stages, "2 × GPU") is None
    for other in (
        {"target": {"device": "cpu"}},
        {"record": {"window": 10**9}},
        {"export": {"formats": ["vllm"]}},  # no data sheet says how long that takes
    ):
        changed = parse_recipe({"name": "r", **other})
        assert predicted_seconds(changed, tmp_path, stages, "1 × GPU") is None, other
    with recorded(tmp_path / "old", STAGES["head"], {}, devices="1 × GPU"):  # a part of its time
        pass
    assert predicted_seconds(longer, tmp_path, stages, "1 × GPU") is None
