"""Exports of EAGLE3 heads with norms: an independent reader of their files computes the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftlab.heads.folder import load_head
from draftlab.target_model.parts import load_parts
from tests.helpers.dense_attention import dense_logits
from tests.helpers.export_toys import HIDDEN, VOCAB, MakeHead, export, read_config, read_tensors
from tests.helpers.plain_chain import PlainChain

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def plain_reader(out: Path, shared: dict[str, Any]) -> tuple[PlainChain, torch.Tensor]:
    """Return the exported head by servers §1.3 alone, and its draft vocabulary's target ids."""
    top = read_config(out)
    layer = top.get("transformer_layer_config", top)
    stored = shared | read_tensors(out)
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in stored.items()}
    config = SimpleNamespace(
        **{**layer, **{flag: top[flag] for flag in FLAGS}},
        family="eagle3",
        num_layers=layer["num_hidden_layers"],
        boundaries=top["eagle_aux_hidden_state_layer_ids"],
        qk_norm=layer["model_type"] == "qwen3",
    )
    ids = torch.arange(top["draft_vocab_size"]) + tensors["d2t"]
    return PlainChain({n: t.double() for n, t in tensors.items()}, config), ids


@pytest.mark.parametrize("program", ["speculators", "vllm"])
@pytest.mark.parametrize(
    "options",
    [
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True},
        {"norm_before_residual": True, "qk_norm": True, "boundaries": (2,)},
    ],
    ids=str,
)
def test_an_exports_drafts_are_the_heads(
    program: str, options: dict[str, Any], make_head: MakeHead, target: Path, tmp_path: Path
) -> None:
    folder = make_head(**options, dtype=torch.float32)
    shared = {"embed_tokens.weight": load_parts(target).embeddings.float()}
    out = export(folder, target, tmp_path / "out", program, dtype="float32")
    plain, ids = plain_reader(out, shared)
    head = load_head(folder, target_tensors=shared, dtype=torch.float32, device="cpu").double()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (7,), generator=generator)
    features = torch.randn(
        5, HIDDEN * len(head.config.boundaries), generator=generator, dtype=torch.float64
    )
    caches, hidden, expected, inputs = plain.empty, None, [], []
    for t in range(7):  # two drafts behind five true pairs
        hidden = plain.project_features(features[t]) if t < 5 else hidden
        inputs.append(head.project_features(features[t]) if t < 5 else hidden)
        hidden, row, caches = plain.step(int(tokens[t]), hidden, t, caches)
        expected.append(row)
    logits = torch.stack(expected)
    torch.testing.assert_close(
        dense_logits(head, tokens, torch.stack(inputs)), logits, rtol=1e-4, atol=1e-3
    )
    assert torch.equal(ids, head.target_ids(torch.arange(len(head.d2t))))
    assert logits.std() > 1
