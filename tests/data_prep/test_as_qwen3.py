"""data_prep/as_qwen3.py: a Llama's weights in Qwen 3's architecture, and what distils them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.drivers import load

qwen = load("data_prep/as_qwen3")


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.5)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def test_the_weights_are_kept_and_norms_have_the_size_of_what_they_norm(
    teacher: LlamaForCausalLM,
) -> None:
    ids = torch.arange(24).view(2, 12)
    student = qwen.as_qwen3(teacher, ids)
    assert student.config.tie_word_embeddings
    assert student.config.head_dim == 8
    tensors, norms = student.state_dict(), 0
    for name, tensor in tensors.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            assert float(tensor.min()) == float(tensor.max()) > 0
            norms += 1
        else:
            assert torch.equal(tensor, teacher.state_dict()[name]), name
    assert norms == 4
    first = teacher.model.layers[0]
    queries = first.self_attn.q_proj(first.input_layernorm(teacher.model.embed_tokens(ids)))
    size = tensors["model.layers.0.self_attn.q_norm.weight"][0]
    assert float(size) == pytest.approx(float(queries.detach().square().mean().sqrt()))


@torch.no_grad()
def test_answers_come_padded_and_only_real_tokens_count(
    teacher: LlamaForCausalLM, tmp_path: Path
) -> None:
    lines = [
        {"answers": [{"prompt_ids": [1, 2], "token_ids": [3]}]},
        {
            "answers": [
                {"prompt_ids": [4], "token_ids": [5, 6, 7]},
                {"prompt_ids": [8, 9], "token_ids": []},
            ]
        },
    ]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = qwen.answered(tmp_path / "answers.jsonl")
    assert texts == [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ids, real = next(qwen.batches(texts, rows=16))
    assert {tuple(row[keep].tolist()) for row, keep in zip(ids, real, strict=True)} == {
        tuple(text) for text in texts
    }
    student = qwen.as_qwen3(teacher, ids)
    apart = qwen.divergence(teacher, student, ids, real)
    assert float(apart) > 0.01
    assert float(qwen.divergence(teacher, teacher, ids, real)) == pytest.approx(0, abs=1e-6)
    other = torch.where(real, ids, 39)
    again = qwen.divergence(teacher, student, other, real)
    assert float(again) == pytest.approx(float(apart))
