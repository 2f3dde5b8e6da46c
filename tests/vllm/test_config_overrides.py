"""Options that make vLLM follow a target's config."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.vllm.vllm_client.loading import engine_options
from tests.helpers.zoo import zoo_folder


@pytest.mark.parametrize("kind", ["llama4", "llama4_text"])
@pytest.mark.parametrize("tuning", [True, False])
def test_the_attention_temperature_is_set(kind: str, tuning: bool, tmp_path: Path) -> None:
    folder = zoo_folder(tmp_path, kind, attn_temperature_tuning=tuning)
    expected = {"override_generation_config": {"attn_temperature_tuning": tuning}}
    assert engine_options(folder) == expected


def test_other_targets_have_no_override(tmp_path: Path) -> None:
    assert engine_options(zoo_folder(tmp_path, "llama")) == {}
