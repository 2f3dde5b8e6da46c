"""Targets that cannot be loaded raise a `UserError` that says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from draftlab.errors import UserError
from draftlab.files import MAX_JSON
from draftlab.recipe.head_spec import target_config
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.locate import (
    config_folder,
    local_target,
    resolve_device,
    resolve_target,
)
from draftlab.target_model.metadata import TargetMetadata
from draftlab.target_model.parts import load_parts
from draftlab.target_model.pipeline_parallel import plan_placement
from draftlab.target_model.settings import TargetSettings
from tests.helpers.toys import toy_target_folder
from tests.helpers.zoo import load_on_cpu, zoo_folder

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


def load_metadata(folder: Path) -> TargetMetadata:
    return TargetMetadata(TargetSettings(path=str(folder), device="cpu"))


def config_of(folder: Path) -> object:
    return target_config(TargetSettings(path=str(folder)))


def tokenizer_of(folder: Path) -> Any:
    return load_tokenizer(TargetSettings(path=str(folder)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo_folder(tmp_path / "target", "llama")


NO_TARGETS = [
    "/no/such/folder",
    "./nor/this",
    "~/absent",
    "a/b/c",
    "plain",
    "my/own model",
    "a/b..c",
]


@pytest.mark.parametrize("path", NO_TARGETS)
def test_a_missing_folder_is_refused(path: str, tmp_path: Path) -> None:
    for find in (resolve_target, config_folder):
        with pytest.raises(UserError, match=r"config\.json") as raised:
            find(TargetSettings(path=path))
        assert raised.value.do
    with pytest.raises(UserError, match=r"config\.json"):
        load_on_cpu(tmp_path)  # an empty folder


def test_missing_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors weights, found none"):
        load_on_cpu(folder)


@pytest.mark.parametrize("keep", [0, 40, -5, LFS])
def test_truncated_weights_are_refused(keep: int | bytes, folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = keep if isinstance(keep, bytes) else weights.read_bytes()[:keep]
    weights.write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_on_cpu(folder)
    assert str(folder) in raised.value.where
    if keep != -5:
        with pytest.raises(UserError, match="truncated or corrupt"):
            fingerprint(folder)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        # transformers would replace it by random numbers.
        ("layers.2.mlp.up_proj.weight", None, r"lacks 1 tensors .*layers\.2\.mlp\.up_proj"),
        ("norm.weight", torch.full((32,), float("nan")), r"found NaN in torch\.float32"),
        ("norm.weight", torch.ones(16), r"norm\.weight in shape \[32\], .* found \[16\]"),
    ],
)
def test_faulty_tensors_are_refused(
    name: str, value: Tensor | None, message: str, folder: Path
) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file) | {f"model.{name}": value}
    save_file({n: t for n, t in tensors.items() if t is not None}, file, {"format": "pt"})
    with pytest.raises(UserError, match=message):
        load_on_cpu(folder)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-architecture"}', "{}"])
def test_an_unknown_config_is_refused(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError):
        load_on_cpu(folder)


def test_too_many_gpus_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UserError, match=r"2 GPUs from cuda:1.*found 1"):
        plan_placement(config, 2, torch.device("cuda:1"))
    assert plan_placement(config, 2, torch.device("cuda")) is not None
    load_on_cpu(folder, gpus=2)  # on a CPU it has no effect


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2"])
def test_a_missing_tokenizer_is_refused(folder: Path, model_type: str) -> None:
    """For some models transformers makes a tokenizer of the special tokens alone."""
    config = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"the target's tokenizer( does not load|, found none)"):
        load_tokenizer(TargetSettings(path=str(folder)))


def test_a_tokenizer_is_shared_until_one_of_its_files_changes(tmp_path: Path) -> None:
    folder = toy_target_folder(tmp_path / "toy")
    first = tokenizer_of(folder)
    assert tokenizer_of(folder) is first
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert tokenizer_of(folder).chat_template == "{{ messages[0].content }}"
    before = tokenizer_of(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 5}')  # ends answers
    assert tokenizer_of(folder) is not before


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "vocab.txt", "special_tokens_map.json", "config.json"]
)
def test_a_file_that_would_fill_the_memory_is_refused(tmp_path: Path, name: str) -> None:
    folder = toy_target_folder(tmp_path / "toy")
    with open(folder / name, "ab") as file:
        file.truncate(MAX_JSON + 1)  # sparse
    with pytest.raises(UserError, match=f"at most {MAX_JSON:,} bytes") as raised:
        tokenizer_of(folder)
    assert raised.value.where == str(folder / name)


@pytest.mark.parametrize("load", [load_on_cpu, load_parts, load_metadata, config_of, tokenizer_of])
def test_a_target_that_ships_code_is_refused_in_draftlabs_words(
    folder: Path, load: Callable[[Path], object]
) -> None:
    """transformers' message names an argument of its own function."""
    code = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}
    config = {"model_type": "own", "architectures": ["M"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": [None, "own.T"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UserError) as raised:
        load(folder)
    assert "needs code that the checkpoint ships" in raised.value.what
    assert "trust_remote_code=True" not in str(raised.value)
    assert "--trust-remote-code" in raised.value.do
    assert "target.trust_remote_code: true" in raised.value.do


@pytest.mark.parametrize("device", ["gpu", "nonsense:0", "cuda:99", "mps", "meta"])
def test_an_unknown_device_is_refused(device: str, folder: Path) -> None:
    with pytest.raises(UserError, match="device"):
        resolve_device(device)
    with pytest.raises(UserError, match="device"):
        load_on_cpu(folder, device=device)


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    folder = toy_target_folder(tmp_path / "toy", layers=2)
    with pytest.raises(UserError, match="expected no revision of a folder or file, found 'v2'"):
        local_target(TargetSettings(path=str(folder), revision="v2"))
