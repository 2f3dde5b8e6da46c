"""verify_export names every change to an export."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftlab.errors import UserError
from tests.helpers.export_toys import HIDDEN, MakeHead, change_tensors, export, read_config, verify


def tensor_at(file: Path, name: str) -> int:
    """Return the offset of a tensor's first byte in the file."""
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
    change_tensors(head, lambda tensors: tensors["norm.weight"][0].fill_(0.0))
    out = export(head, target, tmp_path / "out")
    change_tensors(out, lambda tensors: tensors["norm.weight"][0].fill_(-0.0))
    with pytest.raises(UserError, match=r"norm\.weight.*index 0"):
        verify(out, head, target)


NORM = "layers.0.hidden_norm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NORM}.weight"), r"layers\.0\.hidden_norm\.weight is missing"),
        (
            lambda t: t.update({f"{NORM}.bias": torch.zeros(HIDDEN)}),
            r"layers\.0\.hidden_norm\.bias is unknown",
        ),
        (lambda t: t["d2t"].add_(torch.arange(len(t["d2t"]))), "d2t: expected"),
        (lambda t: t.update(d2t=t["d2t"].int()), r"d2t: expected dtype torch\.int64"),
        (
            lambda t: t.update({"fc.weight": t["fc.weight"].float()}),
            r"fc\.weight: expected dtype torch\.bfloat16",
        ),
    ],
)
def test_changed_tensors_are_found(
    make_head: MakeHead, target: Path, tmp_path: Path, change: Callable, message: str
) -> None:
    head = make_head()
    out = export(head, target, tmp_path / "out")
    change_tensors(out, change)
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
    config = read_config(out)
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner[key]
    inner[last] = value
    if value is ...:
        del inner[last]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=re.escape(path)):
        verify(out, head, target)


@pytest.mark.parametrize("value", [0, None, "4"])
def test_verify_requires_a_number_of_tokens(
    make_head: MakeHead, target: Path, tmp_path: Path, value: object
) -> None:
    head = make_head()
    out = export(head, target, tmp_path / "out")
    config = read_config(out)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = value
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="speculative_tokens"):
        verify(out, head, target)
