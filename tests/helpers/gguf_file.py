"""A GGUF file, written tensor by tensor as llama.cpp's converter does, in 8-bit blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from transformers import LlamaForCausalLM

from tests.helpers.head_toys import interleaved
from tests.helpers.toys import SPECIALS, toy_tokenizer

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(
    folder: Path,
    file: Path,
    *,
    architecture: str = "llama",
    pre: str = "llama-bpe",
    scaling: str | None = None,
    more_tokens: Sequence[tuple[str, int]] = (),
) -> LlamaForCausalLM:
    """Write a checkpoint of `toy_target_folder` as Q8_0; return the model with those weights.

    A RoPE of Llama 3 is stored as the divisors of the frequencies.

    Args:
        architecture: what the metadata say; the tensors are those of a Llama.
        scaling: type of the RoPE's scaling that the metadata name.
        more_tokens: spelling and type of tokens after those of the toy tokenizer.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config, tokenizer = model.config, toy_tokenizer()
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    if scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    if config.rope_parameters["rope_type"] == "llama3":
        scaled = model.model.rotary_emb.inv_freq
        exponents = torch.arange(len(scaled)) / len(scaled)
        divisors = config.rope_parameters["rope_theta"] ** -exponents / scaled
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    types = [3 if word in SPECIALS else 1 for word in words]
    writer.add_token_list([*words, *(text for text, _ in more_tokens)])
    writer.add_token_types([*types, *(kind for _, kind in more_tokens)])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_eot_token_id(tokenizer.convert_tokens_to_ids("<|end_of_text|>"))
    writer.add_chat_template(tokenizer.chat_template)
    kind = GGMLQuantizationType.Q8_0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                writer.add_tensor(_gguf_name(name), weight.numpy())
                continue
            blocks = quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(dequantize(blocks, kind)))
            heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
            count = heads.get(name.split(".")[-2])
            if count:
                blocks = quantize(interleaved(weight, count).numpy(), kind)
            writer.add_tensor(_gguf_name(name), blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
