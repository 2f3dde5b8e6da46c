"""eval/lab/kills.py with a few kills: a run killed while recording or training ends the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.small_run import copy_of_finished

SCRIPT = Path(__file__).parents[2] / "eval" / "lab" / "kills.py"


def test_a_few_random_kills(tmp_path: Path) -> None:
    copy_of_finished(tmp_path)
    (tmp_path / "runs/small").rename(tmp_path / "runs/whole")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "4"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"4 kills .*same bytes: True", done.stdout)
