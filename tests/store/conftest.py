from __future__ import annotations

import pytest

from draftlab.target_model.model import Target
from tests.helpers.recordings import file_hashes, record_store, small_target


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="package")
def expected_hashes(target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of an uninterrupted recording."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    record_store(target, folder)
    return file_hashes(folder)
