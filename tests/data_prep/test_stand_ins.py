"""data_prep/stand_ins.py for a few steps on a CPU: what it leaves is a target like the embedded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.chat_template import template_sha256, tokenizer_sha256
from draftlab.text.prompts import prompt_file
from tests.helpers.bigrams import greedy
from tests.helpers.drivers import load
from tests.helpers.greedy_answers import run
from tests.helpers.messages import read_conversations

stand_ins, token_stream = load("data_prep/stand_ins"), load("data_prep/token_stream")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
CHANGES = {
    "llama4": {"no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 16, "floor_scale": 16},
    "gpt_oss": {"sliding_window": 16},
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "mlp_only_layers": list(range(4)),
    },
}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token arrays as `embedded_target.py pack` writes them, of texts that no edit changes."""
    folder, tokenizer = tmp_path_factory.mktemp("pack"), load_tokenizer(TargetSettings())
    conversations = read_conversations(prompt_file("embedded:heldout"))[:64]
    texts = [conversation.messages[0]["content"] for conversation in conversations]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = [{"prompt_ids": [tokenizer.bos_token_id, *i[:20]], "answer_ids": i[20:90]} for i in ids]
    for split in ("target", "heldout"):
        token_stream.pack_docs(texts, folder / f"docs.{split}", tokenizer)
        token_stream.pack_chat(rows * 4, folder / f"chat.{split}", tokenizer)
    prompts = [{"prompt": r["prompt_ids"], "answer": r["answer_ids"], "source": "s"} for r in rows]
    (folder / "evaluation.json").write_text(json.dumps(prompts))
    return folder


@pytest.mark.parametrize("kind", ["llama4", "gpt_oss", "qwen3_next"])
def test_a_stand_in_is_a_target(kind: str, pack: Path, tmp_path: Path) -> None:
    out = tmp_path / kind
    schedule = stand_ins.Schedule(steps=12, rows=4, length=48, warmup_steps=2)
    changes = SMALL | CHANGES.get(kind, {})
    if kind == "llama4":
        changes |= {"intermediate_size_mlp": 64}
    metrics = stand_ins.train(kind, pack, out, schedule, **changes)
    assert metrics["steps"] == 12
    assert metrics["log"][-1]["loss"] < metrics["log"][0]["loss"] - 0.2
    assert max(file.stat().st_size for file in out.glob("*.safetensors")) <= 12e6

    settings = TargetSettings(path=str(out), device="cpu")
    tokenizer, embedded = load_tokenizer(settings), load_tokenizer(TargetSettings())
    assert tokenizer_sha256(tokenizer) == tokenizer_sha256(embedded)
    assert template_sha256(tokenizer) == template_sha256(embedded)
    target = load_target(settings)
    config = AutoConfig.from_pretrained(out)
    assert config.dtype == torch.bfloat16
    if kind == "gpt_oss":  # what vLLM's reads of it, whatever its type
        names = {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
        assert names <= config.rope_parameters.keys()
    # float32 decoding, over chunks and windows, is transformers' own.
    prompt = tuple(range(100, 121))
    requests = [Request("0", prompt, 24)]
    engine = Engine(target, None, batch=1, max_length=64, block_size=16)
    (answer,) = run(engine, requests)
    if kind == "llama4":
        alone = load_target(TargetSettings(path=f"{out}_text", device="cpu"))
        engine = Engine(alone, None, batch=1, max_length=64, block_size=16)
        assert run(engine, requests)[0].token_ids == answer.token_ids
    assert list(answer.token_ids) == greedy(out, prompt, tokens=24)
