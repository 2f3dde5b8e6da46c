"""Fixtures: a finished run to work in, and the config of a target of 8 B parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.helpers.estimates import LLAMA_8B
from tests.helpers.small_run import copy_of_finished, half_written


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Change into a copy of the finished run; check that no half-written files are left."""
    copy = copy_of_finished(tmp_path / "copy")
    with contextlib.chdir(copy):
        yield copy
    assert half_written(copy) == []


@pytest.fixture(scope="session")
def llama_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with only the config.json of Llama-3.1-8B."""
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(**LLAMA_8B).save_pretrained(folder)
    return folder
