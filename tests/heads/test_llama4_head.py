"""heads/llama4.py against transformers' layers, which read the tensors of its files."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from draftlab.heads.vllm_config import native_config
from tests.helpers.dense_attention import dense_pass, llama4_pass
from tests.helpers.head_toys import LLAMA3, LLAMA4_ATTENTION, LLAMA4_HEAD, make_head

LENGTH = 13  # two borders of chunks, four of temperatures


def with_attention(**changes: object) -> dict[str, object]:
    return LLAMA4_HEAD | {"llama4": LLAMA4_ATTENTION | changes}


CASES = {
    "both": LLAMA4_HEAD,
    "scaled frequencies": LLAMA4_HEAD | {"rope_parameters": LLAMA3},
    "one layer": with_attention(no_rope_layers=(1,)) | {"num_layers": 1},
    "no norm": with_attention(use_qk_norm=False),
    "no chunk": with_attention(attention_chunk_size=None),
    "no temperature": with_attention(attn_temperature_tuning=False),
}


def inputs(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return tokens int64 [T] and last states [T, H]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 50, (LENGTH,), generator=generator)
    return tokens, torch.randn(LENGTH, 24, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES)
def test_the_head_is_what_its_files_say(case: str) -> None:
    """But for rotations, norms and temperatures, which it and transformers make in float32."""
    head = make_head(**CASES[case])
    config, tensors = json.loads(json.dumps(native_config(head.config, "float32"))), head.tensors()
    tokens, states = inputs()
    hidden = head.project_features(states)
    scale = torch.sqrt((states * states).mean(-1, keepdim=True) + head.config.rms_norm_eps)
    torch.testing.assert_close(hidden, tensors["target_norm.weight"] * states / scale)
    outputs = dense_pass(head, tokens, hidden)
    expected = llama4_pass(config, tensors, tokens, hidden)
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
    # What is fed back is what lm_head reads.
    logits = expected @ tensors["lm_head.weight"].t()
    torch.testing.assert_close(head.logits(outputs), logits, rtol=0, atol=1e-5)
