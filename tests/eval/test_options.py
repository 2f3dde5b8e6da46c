"""The driver that measures options: variants share what they can, and none is made twice."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.drivers import load
from tests.helpers.small_run import copy_of_finished

options = load("lab/options")
EAGLE = "head.family=eagle export.formats=[vllm]"


def test_variants_are_measured_against_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_of_finished(tmp_path)
    arguments = ["--recipe", "small.yaml", "--out", "runs", "--prompts", "3", "--k", "2"]
    arguments += ["--seeds", "0", "1", "--change", "record.boundaries=[2]", EAGLE]
    with contextlib.chdir(tmp_path):
        options.main(arguments)
        first = capsys.readouterr().out
        options.main(arguments)
    rows, again = (
        [line for line in text.splitlines() if line.startswith("| ")]
        for text in (first, capsys.readouterr().out)
    )
    assert rows == again
    names = [row.split(" | ")[0] for row in rows]
    assert names == ["| changed", "| recipe", "| record.boundaries=[2]", f"| {EAGLE}"]
    eagle = options.folder_name(EAGLE, 0)
    boundary = "record.boundaries-2-seed0"
    stores = [tmp_path / "runs" / name / "store" for name in ("recipe-seed0", eagle, boundary)]
    manifests = [(store / "manifest.json").read_text() for store in stores]
    assert manifests[0] == manifests[1] != manifests[2]
    (saved,) = json.loads((tmp_path / "runs" / "results.json").read_text())
    base = options.Result.of(saved["parts"]["recipe-seed0"])
    assert base.prompts.shape == (3, 2)
    assert base.al() == 1 + base.prompts[:, 1].sum() / base.prompts[:, 0].sum()
    other = options.Result.of(saved["parts"]["recipe-seed1"])
    again = options.row([base, other], [base, other])
    drafts, accepted = base.prompts.sum(0) + other.prompts.sum(0)
    assert f"| {base.al():.3f} {other.al():.3f} |  | {drafts:,} | {accepted:,} |" in again
    shared = [
        (tmp_path / "runs" / name / "answers.jsonl") for name in ("recipe-seed0", "recipe-seed1")
    ]
    assert shared[0].read_text() == shared[1].read_text()
    weights = [
        tmp_path / "runs" / name / "head/model.safetensors"
        for name in ("recipe-seed0", "recipe-seed1")
    ]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_only_differences_beyond_chance_are_bold() -> None:
    def result(name: str, accepted: np.ndarray) -> object:
        prompts = np.stack([np.full(40, 10), accepted], 1)
        return options.Result(name, 1, "float32", "CPU", 0.0, 0, [0.5], prompts, [1])

    base = result(options.BASE, np.full(40, 5))
    assert "**+0.100 [+0.100, +0.100]**" in options.row([result("other", np.full(40, 6))], [base])
    noisy = result("other", np.random.default_rng(0).integers(0, 11, 40))
    assert "**" not in options.row([noisy], [base])
