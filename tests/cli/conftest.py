"""Fixture: a copy of a finished run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.small_run import copy_of_finished


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the finished run that a test can change."""
    yield copy_of_finished(tmp_path / "work")
    shutil.rmtree(tmp_path / "work")  # hundreds of copies would fill a disk
