"""Recipes for targets of which only the config.json is there, and a finished run to work in."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from draftlab.plan.model_sizes import HeadSize
from draftlab.recipe.head_spec import planned_head, target_config
from draftlab.recipe.recipe import Recipe, parse_recipe
from draftlab.store.manifest import StoreIdentity
from tests.helpers.small_run import copy_of_finished, half_written, new_workshop

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


def recipe(folder: Path, **settings: Any) -> Recipe:
    """Return a recipe for the target in a folder."""
    target = {"path": str(folder), "dtype": "bfloat16"} | settings.pop("target", {})
    return parse_recipe(RECIPE | {"target": target} | settings)


def head_size(settings: Recipe) -> HeadSize:
    """Return the size of a new head that reads three boundaries of Llama-3.1-8B."""
    identity = StoreIdentity("t", "", "", "", (2, 16, 29), 32, 4096, 128256, settings.record.dtype)
    return HeadSize(planned_head(settings, target_config(settings.target), identity), settings)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Change into a copy of the finished run; check that no half-written files are left."""
    copy = copy_of_finished(tmp_path / "copy")
    with contextlib.chdir(copy):
        yield copy
    assert half_written(copy) == []
    shutil.rmtree(copy)  # hundreds of copies would fill a disk


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """Return a working directory with the toy target, prompts and the small recipe."""
    return new_workshop(tmp_path / "workshop")


@pytest.fixture(scope="session")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the config.json of Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(**LLAMA_8B).save_pretrained(folder)
    return folder
