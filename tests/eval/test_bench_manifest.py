"""The benchmark of large stores runs, at a small size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "eval" / "bench" / "bench_manifest.py"


def test_a_small_store(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, BENCH, "--shards", "20", "--records", "2000", "--folder", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "opened 20 shards, 2,000 records" in result.stdout
    assert "drew" in result.stdout
