"""Fixtures: a target, heads for it, and their exports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.export_toys import HIDDEN, ExportedHead, ExportHead, export, save_random_head
from tests.helpers.toys import toy_target_folder


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_target_folder(
        tmp_path_factory.mktemp("export") / "target", hidden=HIDDEN, tied=False
    )


@pytest.fixture
def make_head(target: Path, tmp_path: Path) -> Callable[..., Path]:
    """Saves a random head with these fields."""
    return partial(save_random_head, tmp_path / "head", target)


@pytest.fixture
def export_head(make_head: Callable[..., Path], target: Path, tmp_path: Path) -> ExportHead:
    """Exports a random head with these fields."""

    def write(
        program: str = "speculators",
        *,
        k: int | None = None,
        export_dtype: str | None = None,
        **fields: object,
    ) -> ExportedHead:
        head = make_head(**fields)
        folder = export(head, target, tmp_path / program, program, k=k, dtype=export_dtype)
        return ExportedHead(head, target, folder, program)

    return write
