"""Estimates of the stages of `--plan`: disk, memory and time, from the target's config.json."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from draftlab.files import write_json
from draftlab.plan.estimate import CHECKPOINTS, estimate_stages
from draftlab.plan.sizes import TargetSize
from draftlab.recipe.hardware import GPUS
from draftlab.recipe.head_spec import target_config
from draftlab.train import checkpoint
from tests.helpers.estimates import LLAMA_8B, recipe


def test_a_quantised_target(tmp_path: Path) -> None:
    """Sizes are those of 16 bits; the note says that the files are smaller."""
    quantised = {"quantization_config": {"quant_method": "mxfp4"}}
    LlamaConfig(**LLAMA_8B, **quantised).save_pretrained(tmp_path)
    (line,) = (row.note for row in estimate_stages(recipe(tmp_path)) if row.name == "target")
    assert line.startswith("LlamaForCausalLM: 8.03 B parameters; quantised")


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
        rows = estimate_stages(recipe(tmp_path, record=record, regenerate=answers))
        by_name = {row.name: row for row in rows}
        tokens = 1000 * (min(384, positions) - 256)
        assert f"at most {tokens:,} tokens to generate" in by_name["answers"].note
        assert by_name["store"].disk == 1000 * stored * (4 * 2 * 4096 + 16)
        limited = "conversations of at most the target's 300 positions" in by_name["store"].note
        assert limited == (max_length == 4096)


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


def test_prompts_without_room_for_answers(llama_8b: Path, tmp_path: Path) -> None:
    LlamaConfig(**LLAMA_8B | {"max_position_embeddings": 200}).save_pretrained(tmp_path)
    for settings, note in (
        (recipe(tmp_path), "1,000 conversations whose prompts leave no room"),
        (recipe(llama_8b, regenerate={"enabled": False}), "1,000 conversations with answers"),
    ):
        (answers,) = (row for row in estimate_stages(settings) if row.name == "answers")
        assert answers.note.startswith(note)
