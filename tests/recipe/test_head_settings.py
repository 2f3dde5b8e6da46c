"""The head of a run: what it starts from, and where head.norm_before_residual comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftlab.errors import UserError
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.small_run import error_of, pipeline
from tests.helpers.toys import toy_target_folder


def test_head_init_is_checked_before_any_work(folder: Path) -> None:
    wrong = ("name=other", "head.init=reference")
    error = error_of("head", *wrong)
    assert "hidden_size: the new head has 32, this one" in error.what
    assert "\n  tokenizer: the new head's target, toy, has" in error.what
    assert not Path("runs/other").exists()
    with pytest.raises(UserError) as caught:  # a plan may have only the target's config
        list(pipeline(*wrong).estimate("head"))
    assert "hidden_size: the new head has 32, this one" in caught.value.what
    assert "tokenizer: the new head" not in caught.value.what
    right = pipeline("name=other", "head.init=runs/small/head")
    assert list(right.estimate("head"))
    right.make("head")


def test_a_head_starts_from_one_of_an_older_target(folder: Path) -> None:
    """The newer target has other weights, and the same shape and tokenizer."""
    toy_target_folder(Path("newer"), layers=4, hidden=32, seed=1)
    monitor = RecordingMonitor()
    warm = ("name=newer", "target=newer", "head.init=runs/small/head", "train.steps=1")
    pipeline(*warm, "train.learning_rate=1e-9", monitor=monitor).make("head")
    old, new = (
        json.loads(Path(f"runs/{n}/head/draftlab.json").read_text()) for n in ("small", "newer")
    )
    older = old["target"]["fingerprint"]
    assert new["target"]["fingerprint"] != older
    assert new["provenance"]["initial_head"]["target"] == old["target"]
    line = next(line for line in monitor.lines if line.startswith("starts from"))
    donor = f"(eagle3, 1 layer) of another target, toy ({older[:12]})"
    assert f"{donor}: 13 tensors copied, with" in line
    weights = [load_file(f"runs/{name}/head/model.safetensors") for name in ("small", "newer")]
    assert torch.equal(weights[0]["fc.weight"], weights[1]["fc.weight"])


def head_flag(*overrides: str) -> bool:
    config = pipeline("name=new", "head.family=eagle3", *overrides)
    return bool(config.recipe.head.norm_before_residual)


def test_norm_before_residual_is_on_where_it_raises_al_and_can_be_served(folder: Path) -> None:
    """The value stands in the recipe of the run; the plan says why it is what it is."""
    assert head_flag()
    assert head_flag("export.formats=[speculators,vllm,llamacpp]")
    assert not head_flag("export.formats=[vllm,sglang]")
    assert head_flag("export.formats=[sglang]", "head.norm_before_residual=true")
    assert not head_flag("head.norm_before_residual=false")
    for family in ("peagle", "eagle", "eagle_llama4", "dspark"):
        assert not head_flag(f"head.family={family}"), family
    lines = list(
        pipeline("name=new", "export.formats=[sglang]", "record.boundaries=[1,2,3]").estimate(
            "head"
        )
    )
    assert "head.norm_before_residual: false, which sglang needs" in lines[-1]
    assert "SGLang cannot serve" in list(pipeline("name=new").estimate("head"))[-1]
    explicit = pipeline("name=new", "head.norm_before_residual=true").estimate("head")
    assert not any("norm_before_residual" in line for line in explicit)


def test_norm_before_residual_is_that_of_the_head_that_it_starts_from(folder: Path) -> None:
    old = pipeline("name=old", "head.norm_before_residual=false")
    shutil.copytree("runs/small", "runs/old")
    old.make("head", force=True)
    assert not head_flag("head.init=runs/old/head", "export.formats=[vllm]")
    assert head_flag("head.init=runs/small/head", "export.formats=[vllm,sglang]")


def test_a_training_that_began_with_another_default_goes_on_with_it(folder: Path) -> None:
    record = Path("runs/small/stages/head.json")
    stage = json.loads(record.read_text())
    assert stage["inputs"]["head.norm_before_residual"] is True
    stage["inputs"]["head.norm_before_residual"] = False
    record.write_text(json.dumps(stage))
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make("head")
    assert any(line.startswith("head: there") for line in monitor.lines)
    for name in ("head", "train"):
        shutil.rmtree(f"runs/small/{name}")
    monitor = RecordingMonitor()
    pipeline(monitor=monitor).make("head")
    assert "head.norm_before_residual: false, as this run's training began" in monitor.lines
