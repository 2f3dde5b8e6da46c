"""What vLLM is told of a target's config that it does not read there."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.vllm.vllm_client.own_config import engine_options
from tests.helpers.zoo import zoo_folder


@pytest.mark.parametrize("kind", ["llama4", "llama4_text"])
@pytest.mark.parametrize("tuning", [True, False])
def test_vllm_is_told_whether_attention_is_tempered(
    kind: str, tuning: bool, tmp_path: Path
) -> None:
    folder = zoo_folder(tmp_path, kind, attn_temperature_tuning=tuning)
    expected = {"override_generation_config": {"attn_temperature_tuning": tuning}}
    assert engine_options(folder) == expected


def test_other_targets_are_left_alone(tmp_path: Path) -> None:
    assert engine_options(zoo_folder(tmp_path, "llama")) == {}
