"""Fixtures: a fake vLLM and a small target; a working directory for runs that ask a server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from draftlab.servers import repeated_requests
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from tests.helpers import fake_vllm
from tests.helpers.recordings import small_target
from tests.helpers.small_run import new_workshop


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def metadata(target: Target) -> TargetMetadata:
    return TargetMetadata(TargetSettings(path=str(target.folder), device="cpu"))


@pytest.fixture
def install_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a function that makes the fake package the client's vLLM, and returns its log file."""
    return partial(fake_vllm.install, tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as far as the client reads it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the small recipe; failed requests are repeated at once."""
    monkeypatch.setattr(repeated_requests, "FIRST_WAIT_S", 0.01)
    return new_workshop(tmp_path)
