"""verify_export: every change to an export is found and named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftlab.errors import UserError
from tests.helpers.export_toys import HIDDEN, export, verify

MakeHead = Callable[..., Path]


def tensor_at(file: Path, name: str) -> int:
    """Offset in the file of a tensor's first byte."""
    with open(file, "rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        return 8 + size + json.loads(opened.read(size))[name]["data_offsets"][0]


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "embed_tokens.weight", "d2t", "t2d"])
def test_one_changed_byte_is_found(
    make_head: MakeHead, target: Path, tmp_path: Path, name: str
) -> None:
    head = make_head()
    out = export(head, target, tmp_path / "out")
    verify(out, head, target)
    file = out / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[tensor_at(file, name)] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=name):
        verify(out, head, target)


def test_a_sign_of_zero_is_found(make_head: MakeHead, target: Path, tmp_path: Path) -> None:
    head = make_head()
    tensors = load_file(head / "model.safetensors")
    tensors["norm.weight"][0] = 0.0
    save_file(tensors, head / "model.safetensors")
    out = export(head, target, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    tensors["norm.weight"][0] = -0.0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"norm\.weight.*index 0"):
        verify(out, head, target)


def _drop(tensors: dict) -> None:
    del tensors["layers.0.hidden_norm.weight"]


def _add(tensors: dict) -> None:
    tensors["layers.0.hidden_norm.bias"] = torch.zeros(HIDDEN)


def _absolute(tensors: dict) -> None:
    tensors["d2t"] += torch.arange(len(tensors["d2t"]))


def _narrow(tensors: dict) -> None:
    tensors["d2t"] = tensors["d2t"].to(torch.int32)


def _widen(tensors: dict) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].float()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"layers\.0\.hidden_norm\.weight is missing"),
        (_add, r"layers\.0\.hidden_norm\.bias is unknown"),
        (_absolute, "d2t: expected"),
        (_narrow, r"d2t: expected dtype torch\.int64"),
        (_widen, r"fc\.weight: expected dtype torch\.bfloat16"),
    ],
)
def test_changed_tensors_are_found(
    make_head: MakeHead, target: Path, tmp_path: Path, change: Callable, message: str
) -> None:
    head = make_head()
    out = export(head, target, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=message):
        verify(out, head, target)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("norm_before_residual", True),
        ("eagle_aux_hidden_state_layer_ids", [0, 1, 3, 4]),
        ("draft_vocab_size", 41),
        ("model_type", "llama"),
        ("transformer_layer_config.rope_theta", 10001.0),
        ("transformer_layer_config.rope_parameters.rope_theta", 10001.0),
        ("transformer_layer_config.rope_scaling", None),
        ("transformer_layer_config.num_aux_hidden_states", 3),
        ("transformer_layer_config.max_position_embeddings", 64),
        ("transformer_layer_config.rms_norm_eps", ...),
        ("speculators_config.verifier.architectures", []),
        ("dtype", "float32"),
    ],
)
def test_a_changed_key_is_found(
    make_head: MakeHead, target: Path, tmp_path: Path, path: str, value: object
) -> None:
    head = make_head()
    out = export(head, target, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    *parents, last = path.split(".")
    place = config
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (out / "config.json").write_text(json.dumps(config))
    named = "dtype" if path == "dtype" else path.replace(".", r"\.")
    with pytest.raises(UserError, match=named):
        verify(out, head, target)


@pytest.mark.parametrize("value", [0, None, "4"])
def test_verify_wants_tokens_to_draft(
    make_head: MakeHead, target: Path, tmp_path: Path, value: object
) -> None:
    head = make_head()
    out = export(head, target, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = value
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="speculative_tokens"):
        verify(out, head, target)
