"""Fixture: a working directory for runs that ask a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftlab.text import server_answers
from tests.helpers.small_run import new_workshop


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with the small recipe; failed requests are repeated at once."""
    monkeypatch.setattr(server_answers, "FIRST_WAIT_S", 0.01)
    return new_workshop(tmp_path)
