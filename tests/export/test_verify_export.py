"""`PlannedExport.verify` names every change to an export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from draftlab.errors import UserError
from tests.helpers.export_toys import (
    LAYERS,
    LLAMA4,
    PEAGLE,
    ExportHead,
    change_tensors,
)

NORM = "layers.0.hidden_norm"


def flip(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Return a change of the lowest bit of a tensor's first byte."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1).view(torch.uint8)[0] ^= 1

    return change


@pytest.mark.parametrize(
    ("program", "fields", "change", "message"),
    [
        *(("speculators", {}, flip(name), name) for name in ("fc.weight", "d2t", "t2d")),
        ("vllm", LLAMA4, flip("embed_tokens.weight"), r"embed_tokens\.weight"),
        (
            "speculators",
            {},
            lambda t: t.pop(f"{NORM}.weight"),
            r"layers\.0\.hidden_norm\.weight is missing",
        ),
        (
            "speculators",
            {},
            lambda t: t.update({"fc.weight": t["fc.weight"].float()}),
            r"fc\.weight: expected dtype torch\.bfloat16",
        ),
        (
            "speculators",
            PEAGLE,
            lambda t: t.update(mask_hidden=t["mask_hidden"][0]),
            "mask_hidden: expected shape",
        ),
    ],
)
def test_a_changed_tensor_is_named(
    export_head: ExportHead, program: str, fields: dict, change: Callable, message: str
) -> None:
    exported = export_head(program, **fields)
    exported.verify()
    change_tensors(exported.folder, change)
    with pytest.raises(UserError, match=message):
        exported.verify()


def test_a_sign_of_zero_is_a_difference(export_head: ExportHead) -> None:
    exported = export_head()
    for folder, zero in ((exported.head, 0.0), (exported.folder, -0.0)):
        change_tensors(folder, lambda tensors, zero=zero: tensors["norm.weight"][0].fill_(zero))
    with pytest.raises(UserError, match=r"norm\.weight.*index 0"):
        exported.verify()


TOKENS = "speculators_config.proposal_methods.0.speculative_tokens"


@pytest.mark.parametrize(
    ("program", "fields", "path", "value"),
    [
        ("speculators", {}, "norm_before_residual", True),
        ("speculators", {}, "transformer_layer_config.rms_norm_eps", ...),
        ("speculators", {}, TOKENS, "4"),
        ("vllm", LLAMA4, "no_rope_layers", [0] * LAYERS + [1, 0]),
    ],
)
def test_a_changed_key_is_named(
    export_head: ExportHead, program: str, fields: dict, path: str, value: object
) -> None:
    exported = export_head(program, **fields)
    config = exported.config
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner[int(key) if isinstance(inner, list) else key]
    inner[last] = value
    if value is ...:
        del inner[last]
    (exported.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=last if path == TOKENS else re.escape(path)):
        exported.verify()
