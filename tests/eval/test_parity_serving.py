"""SGLang's and vLLM's own readers read an export's files as the tests' readers do.

`make parity-serving` installs them; without them these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.export.conftest import make_head, target
from tests.export.test_serving import VLLM, K, calibration, command, timed_rows, write_report
from tests.helpers.export_toys import DSPARK, export
from tests.helpers.server_files import drafts_by_batch, read_sps, read_sts

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
def test_sglang_reads_temperatures_and_rates(
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
    rates = read_sps(out / "sps.json")
    tokens = list(rates)
    expected = [
        rates[tokens[max(bisect_right(tokens, n) - 1, 0)]] for n in range(1, len(found["sps"]) + 1)
    ]
    assert found["sps"] == expected
    assert found["max_batch_tokens"] == tokens[-1]


def test_vllm_reads_the_schedule(
    make_head: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    head = make_head(**DSPARK)
    report = write_report(tmp_path / "eval", [calibration(head)], timed_rows(**VLLM))
    out = export(head, target, tmp_path / "out", "vllm", calibration=report)
    found = read_by_servers(out)
    assert found["unknown_fields"] == []
    words = command(out, "vllm serve")
    config = json.loads(words[words.index("--speculative-config") + 1])
    entries = config["num_speculative_tokens_per_batch_size"]
    assert found["drafts"] == drafts_by_batch(entries, K, len(found["drafts"]))
    assert len(set(found["drafts"])) == 3
