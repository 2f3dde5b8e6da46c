from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch

from draftlab import version
from draftlab.evaluate.metrics import environment
from draftlab.heads.family import family_names
from draftlab.version import NOT_INSTALLED, package_version
from tests.helpers.small_run import draftlab


def test_the_commit_is_of_draftlabs_own_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """draftlab may be installed into an environment inside another project's working tree."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(version, "__file__", str(tmp_path / "site-packages/draftlab/version.py"))
    monkeypatch.setattr(version.subprocess, "run", lambda *_, **__: pytest.fail("git was called"))
    assert version.git_commit() is None


def test_a_source_tree_that_is_not_installed_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Packages without metadata: programs on PYTHONPATH, as on GPU machines."""

    def from_name(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata.Distribution, "from_name", from_name)
    monkeypatch.setattr(metadata, "distributions", lambda **_: iter(()))
    assert package_version() == NOT_INSTALLED
    assert draftlab(tmp_path, "version").stdout == f"{NOT_INSTALLED}\n"
    assert environment(torch.device("cpu"))["draftlab"] == NOT_INSTALLED
    monkeypatch.setattr("draftlab.heads.family._loaded", False)
    assert "eagle3" in family_names()
