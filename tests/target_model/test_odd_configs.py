"""Values in a target's config.json with which nothing can be computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.heads.config import make_head_config
from draftlab.heads.folder import CONFIG, load_config
from draftlab.recipe.head_spec import target_config
from draftlab.run.resolve import reference_head
from draftlab.target_model.loading import load_target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.small_run import draftlab
from tests.helpers.toys import toy_target_folder

NO_BASES = [0, -1, 0.0, -1e4, float("nan"), float("inf"), "big", None, True, [1], 10**400]


def edited(folder: Path, **fields: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("theta", NO_BASES)
def test_a_targets_rope_base_is_positive(tmp_path: Path, theta: Any) -> None:
    rope = {"rope_type": "default", "rope_theta": theta}
    folder = edited(toy_target_folder(tmp_path / "toy", layers=2), rope_parameters=rope)
    settings = TargetSettings(path=str(folder), device="cpu")
    for read in (target_config, load_target):
        with pytest.raises(UserError, match=r"rope_theta|does not load") as caught:
            read(settings)
        assert str(folder) in caught.value.where


@pytest.mark.parametrize("theta", NO_BASES)
def test_a_heads_rope_base_is_positive(tmp_path: Path, theta: Any) -> None:
    fields = json.loads((reference_head() / CONFIG).read_text())
    fields["rope_parameters"] |= {"rope_theta": theta}
    (tmp_path / CONFIG).write_text(json.dumps(fields))
    with pytest.raises(UserError, match="positive finite number") as caught:
        load_config(tmp_path)
    assert caught.value.where == str(tmp_path / CONFIG)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": float("nan")},
        {"rope_type": ["linear"]},
        {
            "rope_type": "llama3",
            "factor": 8,
            "low_freq_factor": 4,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_other_values_of_a_heads_rope(rope: dict[str, Any]) -> None:
    fields = json.loads((reference_head() / CONFIG).read_text())
    with pytest.raises(ValueError, match=r"positive finite|not supported|low_freq_factor below"):
        make_head_config(**fields | {"rope_parameters": {"rope_theta": 1e4} | rope})


def test_a_target_of_a_billion_layers_is_refused_before_any_is_made(tmp_path: Path) -> None:
    folder = edited(toy_target_folder(tmp_path / "toy", layers=2), num_hidden_layers=10**9)
    settings = TargetSettings(path=str(folder), device="cpu")
    for read in (target_config, load_target):
        with pytest.raises(UserError, match="at most 1,024 layers, found 1,000,000,000"):
            read(settings)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "gemma3_text", "num_hidden_layers": 5_000}
    nested = {"model_type": "gemma3", "text_config": config}  # of a multimodal model
    (folder / "config.json").write_text(json.dumps(nested))
    with pytest.raises(UserError, match="at most 1,024 layers, found 5,000"):
        target_config(settings)


def test_a_target_of_few_positions(tmp_path: Path) -> None:
    edited(toy_target_folder(tmp_path / "toy", layers=4), max_position_embeddings=16)
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    (tmp_path / "r.yaml").write_text("target: toy\nprompts: {source: p.jsonl}\n")
    result = draftlab(tmp_path, "prepare", "r.yaml", "regenerate.max_new_tokens=2")
    assert result.exit_code == 2, result.output
    assert "positions" in result.output or "no room" in result.output
