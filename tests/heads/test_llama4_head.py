"""heads/llama4.py against a few lines written from servers §1.2, and against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextModel

from draftlab.heads.vllm_config import native_config
from tests.helpers.dense_attention import dense_pass
from tests.helpers.head_toys import LLAMA3, LLAMA4_ATTENTION, LLAMA4_HEAD, make_head
from tests.helpers.llama4_reader import Reader

LENGTH = 13  # two borders of chunks, four of temperatures


def with_attention(**changes: object) -> dict[str, object]:
    return LLAMA4_HEAD | {"llama4": LLAMA4_ATTENTION | changes}


CASES = {
    "both": LLAMA4_HEAD,
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
    """But for rotations, norms and temperatures, which it makes in float32."""
    head = make_head(**CASES[case])
    config = json.loads(json.dumps(native_config(head.config, "float32")))
    reader = Reader(config, head.tensors())
    tokens, states = inputs()
    outputs = dense_pass(head, tokens, head.project_features(states))
    for position, (token, state) in enumerate(zip(tokens.tolist(), states, strict=True)):
        normed = reader.norm(state, "target_norm")
        expected = reader.step(token, normed, position)
        torch.testing.assert_close(outputs[position], expected, rtol=0, atol=1e-5)
    # What is fed back is what lm_head reads.
    logits = torch.stack([reader.w["lm_head.weight"] @ state for state in outputs])
    torch.testing.assert_close(head.logits(outputs), logits, rtol=0, atol=1e-5)


def test_layers_are_transformers_own() -> None:
    """Weights go into transformers' layers under their own names, and states are the same."""
    head = make_head(**LLAMA4_HEAD, rope_parameters=LLAMA3)
    fields = native_config(head.config, "float64")
    config = Llama4TextConfig(**fields)
    config._attn_implementation = "eager"
    model = Llama4TextModel(config).double().eval()
    tensors = {n: t for n, t in head.tensors().items() if n.startswith(("layers", "norm"))}
    assert model.load_state_dict(tensors, strict=False).unexpected_keys == []
    tokens, states = inputs()
    fed = head.fc(torch.cat([head.embed(tokens), head.project_features(states)], -1))
    with torch.no_grad():
        expected = model(inputs_embeds=fed[None], use_cache=False).last_hidden_state[0]
    # transformers rotates in float32.
    outputs = dense_pass(head, tokens, head.project_features(states))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
