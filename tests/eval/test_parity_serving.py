"""SGLang's and vLLM's own readers read an export's files as the tests' readers do.

`make parity-serving` installs them; without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftlab.evaluate.server_schedule import read_schedule, sglang_schedule
from tests.evaluate.test_server_schedule import write_benches
from tests.export.conftest import make_head, target
from tests.export.test_serving import K, calibration, write_report
from tests.helpers.export_toys import DSPARK, export
from tests.helpers.server_files import drafts_by_batch, read_sts

__all__ = ["make_head", "target"]
ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "eval/parity/setup_serving.sh"
pytestmark = pytest.mark.skipif(
    subprocess.run([SETUP, "--check"], capture_output=True, check=False).returncode != 0,
    reason="SGLang's and vLLM's readers are not installed (make parity-serving)",
)


def read_by_servers(folder: Path) -> dict[str, Any]:
    environments = ROOT / os.environ.get("DRAFTLAB_ENVS", ".envs")
    script = ROOT / "eval/parity/serving_readers.py"
    run = subprocess.run(
        [environments / "serving/bin/python", script, folder],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.parametrize("bake", [False, True])
def test_sglang_reads_temperatures(
    make_head: Callable[..., Path], target: Path, tmp_path: Path, bake: bool
) -> None:
    head = make_head(**DSPARK, dtype=torch.float32)
    report = write_report(tmp_path / "eval", [calibration(head)])
    options = {"calibration": report, "bake_temperature": bake}
    out = export(head, target, tmp_path / "out", "sglang", **options)
    found = read_by_servers(out)
    assert found["sts"]["temperatures"] == read_sts(out / "sts.json", K)
    assert found["sts"]["num_samples"] > 0
    assert len(found["sts"]["ece_before"]) == len(found["sts"]["ece_after"]) == K


def test_vllm_reads_the_schedule(tmp_path: Path) -> None:
    write_benches(tmp_path)
    entries = read_schedule(sorted(tmp_path.glob("*.json")))
    config = {"num_speculative_tokens": 7, "num_speculative_tokens_per_batch_size": entries}
    launch = f"vllm serve T --speculative-config '{json.dumps(config)}'\n"
    (tmp_path / "launch.md").write_text(launch)
    found = read_by_servers(tmp_path)
    assert found["unknown_fields"] == []
    assert found["drafts"] == drafts_by_batch([*map(list, entries)], 7, len(found["drafts"]))
    assert len(set(found["drafts"])) == 3


def test_sglang_reads_the_schedule(tmp_path: Path) -> None:
    write_benches(tmp_path)
    entries = read_schedule(sorted(tmp_path.glob("*.json")))
    (tmp_path / "launch.md").write_text("")
    (tmp_path / "adaptive.json").write_text(json.dumps(sglang_schedule(entries)))
    found = read_by_servers(tmp_path)["steps"]
    assert found == drafts_by_batch([*map(list, entries)], 7, len(found))
