"""An independent reader of an export's files computes the head's logits (servers §1)."""

from __future__ import annotations

import pytest
import torch

from draftlab.heads.folder import load_head
from draftlab.target_model.parts import load_parts
from tests.helpers.dense_attention import dense_pass, llama4_pass
from tests.helpers.export_toys import (
    EAGLE,
    HIDDEN,
    LLAMA3,
    LLAMA4,
    MASK,
    PEAGLE,
    VOCAB,
    YARN,
    ExportHead,
)
from tests.helpers.plain_chain import read_export

SIZE, DRAFTS = 6, 2
RESIDUAL = {"norm_before_residual": True}


@pytest.mark.parametrize(
    ("program", "fields"),
    [
        ("speculators", {"rope_parameters": LLAMA3, "boundaries": (0, 1, 4, 6)}),
        ("speculators", {"rope_parameters": LLAMA3, "draft_vocab_size": VOCAB}),
        *(("speculators", PEAGLE | f) for f in ({"num_layers": 1}, {}, {"qk_norm": True})),
        ("speculators", PEAGLE | RESIDUAL | {"rope_parameters": LLAMA3}),
        ("vllm", {"rope_parameters": LLAMA3}),
        *((program, {"rope_parameters": YARN}) for program in ("speculators", "vllm", "sglang")),
        ("vllm", PEAGLE),
        ("vllm", EAGLE),
        ("sglang", {"rope_parameters": LLAMA3}),
        ("sglang", EAGLE),
        ("llamacpp", {"rope_parameters": LLAMA3}),
        ("llamacpp", RESIDUAL),
        *(
            (program, fields)
            for program in ("speculators", "vllm")
            for fields in (
                RESIDUAL,
                {"norm_before_fc": True},
                {"num_layers": 3},
                {"sliding_window": 5, "k_trained": 3},
                {"fc_norm": True, "norm_output": True},
                RESIDUAL | {"qk_norm": True, "boundaries": (2,)},
            )
        ),
    ],
    ids=str,
)
def test_an_exports_drafts_are_the_heads(
    export_head: ExportHead, program: str, fields: dict
) -> None:
    """Two drafts stand behind six true pairs: fed-back states, or masked slots of one pass."""
    exported = export_head(program, dtype=torch.float32, **fields)
    shared = load_parts(exported.target).shared_tensors
    plain, ids = read_export(exported.folder, shared)
    head = load_head(exported.head, target_tensors=shared, dtype=torch.float32, device="cpu")
    head = head.double()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCAB, (SIZE + DRAFTS,), generator=generator)
    features = torch.randn(SIZE, head.config.feature_size, generator=generator, dtype=torch.float64)
    mask = plain.w.get("mask_hidden")
    if mask is not None:
        assert plain.c.mask_token_id == MASK
        tokens[tokens == MASK], tokens[SIZE:] = 0, MASK
    caches, hidden, expected, inputs = plain.empty, None, [], []
    for t in range(SIZE + DRAFTS):
        if t < SIZE:
            inputs.append(head.project_features(features[t]))
            hidden = plain.project_features(features[t])
        elif mask is not None:
            inputs.append(head.mask_state())
            hidden = plain.project_features(mask.flatten())
        else:
            inputs.append(hidden)
        hidden, row, caches = plain.step(int(tokens[t]), hidden, t, caches)
        expected.append(row)
    logits = torch.stack(expected)
    outputs = dense_pass(head, tokens, torch.stack(inputs))
    torch.testing.assert_close(head.logits(outputs), logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(ids, head.target_ids(torch.arange(len(ids))))
    assert logits.std() > 1  # constant logits would equal anything


def test_a_llama4_exports_outputs_are_the_heads(export_head: ExportHead) -> None:
    exported = export_head("vllm", dtype=torch.float32, **LLAMA4)
    shared = load_parts(exported.target).shared_tensors
    head = load_head(exported.head, target_tensors=shared, dtype=torch.float32, device="cpu")
    head = head.double()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (13,), generator=generator)
    states = torch.randn(13, HIDDEN, generator=generator, dtype=torch.float64)
    normed = head.project_features(states)
    outputs = dense_pass(head, tokens, normed)
    expected = llama4_pass(exported.config, exported.tensors, tokens, normed)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
