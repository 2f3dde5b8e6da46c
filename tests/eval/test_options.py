"""The driver that measures options: variants share what they can, and none is made twice."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest

from draftlab.pipeline.check_recipe import check_head
from draftlab.pipeline.head_spec import target_config
from draftlab.pipeline.recipe import load_recipe
from tests.helpers.drivers import load
from tests.helpers.small_run import copy_of_finished

options = load("lab/options")


def test_variants_are_measured_against_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy_of_finished(tmp_path)
    arguments = ["--recipe", "small.yaml", "--out", "runs", "--prompts", "3", "--k", "2"]
    arguments += ["--seeds", "0", "1", "--only", "base", "eagle", "one boundary, 9"]
    monkeypatch.setitem(options.VARIANTS, "one boundary, 9", "record.boundaries=[2]")
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
    assert names == ["| changed", "| base", "| one boundary, 9", "| eagle"]
    stores = [tmp_path / "runs" / name / "store" for name in ("base", "eagle", "one-boundary-9")]
    manifests = [(store / "manifest.json").read_text() for store in stores]
    assert manifests[0] == manifests[1] != manifests[2]
    (saved,) = json.loads((tmp_path / "runs" / "results.json").read_text())
    base = options.Result.of(saved["parts"]["base"])
    assert base.prompts.shape == (3, 2)
    assert base.al() == 1 + base.prompts[:, 1].sum() / base.prompts[:, 0].sum()
    other = options.Result.of(saved["parts"]["base-seed1"])
    again = options.row([base, other], [base, other])
    drafts, accepted = base.prompts.sum(0) + other.prompts.sum(0)
    assert f"| {base.al():.3f} {other.al():.3f} |  | {drafts:,} | {accepted:,} |" in again
    shared = [(tmp_path / "runs" / name / "answers.jsonl") for name in ("base", "base-seed1")]
    assert shared[0].read_text() == shared[1].read_text()
    weights = [
        tmp_path / "runs" / name / "head/model.safetensors" for name in ("base", "base-seed1")
    ]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_only_differences_beyond_chance_are_bold() -> None:
    def result(name: str, accepted: np.ndarray) -> object:
        prompts = np.stack([np.full(40, 10), accepted], 1)
        return options.Result(name, [], 1, "float32", "CPU", 0.0, 0, [0.5], prompts, [1])

    base = result("base", np.full(40, 5))
    assert "**+0.100 [+0.100, +0.100]**" in options.row([result("other", np.full(40, 6))], [base])
    noisy = result("other", np.random.default_rng(0).integers(0, 11, 40))
    assert "**" not in options.row([noisy], [base])


@pytest.mark.parametrize("recipe", ["quickstart", "quickstart_peagle", "quickstart_dspark"])
def test_a_family_can_have_its_default_variants(recipe: str) -> None:
    path = options.RECIPE.with_name(f"{recipe}.yaml")
    for settings in options.FAMILIES[load_recipe(path).head.family].values():
        changed = load_recipe(path, settings.split())
        check_head(changed, target_config(changed.target))
