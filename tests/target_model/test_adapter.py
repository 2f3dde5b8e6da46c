"""LoRA adapters as part of a target, beside peft's own merge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftlab.errors import UserError
from draftlab.evaluate.results import Report
from draftlab.files import CACHE
from draftlab.target_model.loading import load_target
from draftlab.target_model.locate import local_target, resolve_target
from draftlab.target_model.settings import TargetSettings
from tests.helpers.small_run import copy_of_finished, draftlab
from tests.helpers.toys import toy_target_folder

IDS = torch.arange(1, 30)[None]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return toy_target_folder(tmp_path / "base", layers=2, tied=False)


def write_adapter(base: Path, folder: Path, seed: int = 0, **options: Any) -> Path:
    """Write an adapter whose two factors are random."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    fields = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **(fields | options)))
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.data.normal_(std=0.2)
        adapted.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "alpha_pattern": {"down_proj": 3}, "rank_pattern": {"v_proj": 2}},
        {"alpha_pattern": {"proj": 3, "mlp.down_proj": 5}},  # no module is named proj
        {"target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ],
)
def test_the_target_is_the_model_that_peft_merges(
    tmp_path: Path, base: Path, options: dict[str, Any]
) -> None:
    adapter = write_adapter(base, tmp_path / "style", **options)
    settings = TargetSettings(path=str(base), adapter=str(adapter), device="cpu")
    target = load_target(settings)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = PeftModel.from_pretrained(plain, adapter).merge_and_unload().eval()
    with torch.no_grad():
        torch.testing.assert_close(
            target.logits(target.states(IDS).last), merged(input_ids=IDS).logits
        )
    without = load_target(TargetSettings(path=str(base), device="cpu"))
    assert target.fingerprint != without.fingerprint
    assert any("style is merged, in" in note for note in target.notes)
    assert resolve_target(settings) == target.folder


def test_each_adapter_and_base_has_a_folder_of_its_own(tmp_path: Path, base: Path) -> None:
    one, other = (write_adapter(base, tmp_path / f"{i}" / "style", seed=i) for i in range(2))
    folders = {
        resolve_target(TargetSettings(path=str(base), adapter=str(adapter)))
        for adapter in (one, other, one)
    }
    assert len(folders) == 2
    settings = TargetSettings(path=str(base), adapter=str(one))
    path = one / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 24}))
    folders.add(resolve_target(settings))
    assert len(folders) == 3, "other weights by the adapter's config"
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    folders.add(resolve_target(settings))
    assert len(folders) == 4, "other weights of the base"


def test_an_adapter_without_alpha_has_the_default_of_peft(tmp_path: Path, base: Path) -> None:
    tensors = []
    for alpha in (8, None):
        adapter = write_adapter(base, tmp_path / f"{alpha}", lora_alpha=8)
        config = json.loads((adapter / "adapter_config.json").read_text())
        if alpha is None:
            del config["lora_alpha"]
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        folder = resolve_target(TargetSettings(path=str(base), adapter=str(adapter)))
        tensors.append(load_file(folder / "model.safetensors"))
    assert LoraConfig().lora_alpha == 8
    for name, tensor in tensors[0].items():
        assert torch.equal(tensor, tensors[1][name]), name


def test_what_cannot_be_merged_is_refused(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(base, tmp_path / "style")

    def refused(message: str, where: Path = adapter) -> None:
        with pytest.raises(UserError, match=message):
            resolve_target(TargetSettings(path=str(base), adapter=str(where)))
        assert not list((tmp_path / "cache").glob("adapters/*/config.json"))

    refused("expected a LoRA adapter", tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for change in ({"use_dora": True}, {"peft_type": "IA3"}, {"lora_bias": True}):
        (adapter / "adapter_config.json").write_text(json.dumps(config | change))
        refused(f"expected {next(iter(change))} ")
    slow = "((a|[a-z_.0-9])*)*!"  # takes time exponential in the length of a module's name
    for change, message in (
        ({"init_lora_weights": "pissa"}, "expected init_lora_weights true, found pissa"),
        ({"init_lora_weights": "pissa_niter_4"}, "found pissa_niter_4"),
        ({"alora_invocation_tokens": [1, 2]}, "expected no alora_invocation_tokens"),
        ({"alpha_pattern": {slow: 3}}, "expected names of modules in alpha_pattern"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps(config | change))
        refused(message)
    for change in ({"lora_alpha": "x"}, {"lora_alpha": -1}, {"alpha_pattern": {"q_proj": None}}):
        (adapter / "adapter_config.json").write_text(json.dumps(config | change))
        refused("expected a positive number as alpha, found")
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": [1]}))
    refused("expected alpha_pattern by module")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = next(name for name in tensors if ".lora_A." in name)
    renamed = {name.replace("layers.1", "layers.7"): x for name, x in tensors.items()}
    narrow = {name: x[..., :3].contiguous() if name == first else x for name, x in tensors.items()}
    single = {name: x for name, x in tensors.items() if name != first}
    for changed, message in (
        (renamed, "changes 3 tensors that the target does not have"),
        (narrow, "in shape"),
        (single, "expected pairs lora_A and lora_B"),
    ):
        save_file(changed, weights)
        refused(message)


def test_quantised_weights_are_not_merged(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(base, tmp_path / "style")
    file = base / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("v_proj.weight"):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file)
    with pytest.raises(UserError, match="an adapter is merged with weights that are not quantised"):
        resolve_target(TargetSettings(path=str(base), adapter=str(adapter)))


def test_an_adapter_is_not_merged_where_no_weights_are_needed(tmp_path: Path, base: Path) -> None:
    settings = TargetSettings(path=str(base), adapter=str(write_adapter(base, tmp_path / "style")))
    assert resolve_target(settings, ("config.json",)) == base


def test_adapter_files_beside_a_checkpoint_are_never_ignored(tmp_path: Path, base: Path) -> None:
    adapter = write_adapter(base, tmp_path / "style")
    with pytest.raises(UserError, match=r"found a LoRA adapter\nat"):
        local_target(TargetSettings(path=str(adapter)))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (base / name).write_bytes((adapter / name).read_bytes())
    with pytest.raises(UserError, match="found a LoRA adapter beside one"):
        local_target(TargetSettings(path=str(base)))


def test_an_adapter_of_the_hub_is_no_target(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(base, tmp_path / "style")
    monkeypatch.setattr("draftlab.target_model.locate.hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(adapter))
    with pytest.raises(UserError, match="expected a checkpoint, found a LoRA adapter"):
        resolve_target(TargetSettings(path="org/style"))


def test_a_head_is_measured_under_an_adapter_that_it_was_not_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    workshop = copy_of_finished(tmp_path / "workshop")
    write_adapter(workshop / "toy", workshop / "style")
    result = draftlab(workshop, "eval", "--run", "small", "--adapter", "style", "--out", "styled")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "the head was trained with target.adapter=None, and is measured with style" in said
    plain, styled = (
        Report.read(workshop / name / "report.json") for name in ("runs/small/eval", "styled")
    )
    assert plain.target["fingerprint"] != styled.target["fingerprint"]
    assert styled.target["adapter"] == "style"
    assert "target toy with adapter style (" in said
    assert all(row.acceptance_length for row in styled.rows if row.k)
    toy_target_folder(workshop / "other", layers=6, hidden=32, seed=1)
    options = ("--head", "runs/small/head", "--target", "other", "--adapter", "style")
    result = draftlab(workshop, "eval", *options, "--suite", "prompts.jsonl")
    assert result.exit_code == 2
    assert "which is not this target" in result.output
