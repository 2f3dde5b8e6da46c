"""eval/lab/kills.py with a few kills: a run that is killed in any stage ends the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "eval" / "lab" / "kills.py"


@pytest.mark.slow
def test_a_few_random_kills(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "6", "--folder", str(tmp_path / "work")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 kills" in done.stdout
    assert "0 faults; same bytes: True" in done.stdout
