"""Targets that cannot be loaded are the user's to mend, and are told so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from draftlab.errors import UserError
from draftlab.target_model.fingerprint import fingerprint
from draftlab.target_model.model import (
    TargetSettings,
    load_target,
    load_tokenizer,
    resolve_device,
    resolve_target,
)
from draftlab.target_model.pipeline_parallel import layer_places
from tests.helpers.zoo import zoo_folder

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo_folder(tmp_path / "target", "llama")


def load(folder: Path, **settings: object) -> None:
    load_target(TargetSettings(path=str(folder), **({"device": "cpu"} | settings)))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nor/this", "~/absent", "a/b/c", "plain"])
def test_no_folder(path: str) -> None:
    with pytest.raises(UserError, match=r"config\.json") as caught:
        resolve_target(TargetSettings(path=path))
    assert caught.value.do


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        load(tmp_path)


def test_the_embedded_target_is_found() -> None:
    assert (resolve_target(TargetSettings()) / "config.json").is_file()


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="safetensors weights, found none"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 40, -5])
def test_truncated_weights(keep: int, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(UserError) as caught:
        load(folder)
    assert str(folder) in caught.value.where
    if keep >= 0:
        with pytest.raises(UserError, match="truncated or corrupt"):
            fingerprint(folder)


def test_a_pointer_of_git_lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(LFS)
    with pytest.raises(UserError, match="truncated or corrupt"):
        fingerprint(folder)
    with pytest.raises(UserError):
        load(folder)


@pytest.mark.parametrize("text", ["{", '{"model_type": "no-such-architecture"}', "{}"])
def test_a_config_that_says_nothing(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(UserError):
        load(folder)


def test_weights_of_another_shape(folder: Path, tmp_path: Path) -> None:
    other = zoo_folder(tmp_path / "other", "llama", hidden_size=16)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(UserError):
        load(folder)


def test_a_tensor_that_is_not_there(folder: Path) -> None:
    """transformers would fill it with random numbers and go on."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 tensors .*model\.layers\.2\.mlp\.up_proj"):
        load(folder)


def test_weights_that_are_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"found NaN in torch\.float32"):
        load(folder)


def test_more_gpus_than_there_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = AutoConfig.from_pretrained(folder)
    with pytest.raises(UserError, match="and there are 1 GPUs from cuda:1 on"):
        layer_places(config, 2, torch.device("cuda:1"))
    assert layer_places(config, 2, torch.device("cuda")) is not None
    load(folder, gpus=2)  # on a CPU it has no effect


def test_no_tokenizer(folder: Path) -> None:
    with pytest.raises(UserError, match="tokenizer"):
        load_tokenizer(TargetSettings(path=str(folder)))


@pytest.mark.parametrize("device", ["gpu", "nonsense:0", "cuda:99", "mps", "meta"])
def test_a_device_that_is_not_there(device: str, folder: Path) -> None:
    with pytest.raises(UserError, match="device"):
        resolve_device(device)
    with pytest.raises(UserError, match="device"):
        load(folder, device=device)


def test_auto_is_a_device_that_is_there() -> None:
    assert resolve_device("auto").type in ("cpu", "cuda")
    assert resolve_device("cpu").type == "cpu"
