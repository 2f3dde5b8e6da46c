"""Tiny stand-ins shared by the tests: a tokenizer made in memory and random targets on disk."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|mask|>",
)

# A few merges by hand: training a BPE here would break ties differently from run to run.
# fmt: off
_MERGES = [
    "h e", "i n", "o n", "r e", "Ġ t", "Ġ a", "Ġt he", "u s", "us e", "use r", "a s", "s i",
    "as si", "s t", "assi st", "a n", "an t", "assist ant", "Ċ Ċ", "Ġ Ġ", "ĠĠ ĠĠ", "d e", "de f",
    "l o", "e r",
]
# fmt: on
# Llama-3's split: newlines stay together whatever follows, so a prompt's last token keeps.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""Llama-3 turns with generation markers, as the embedded target has them."""

CHATML_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
"""Qwen's turns without markers: a newline follows the closing tag."""


def toy_tokenizer(
    chat_template: str | None = LLAMA3_TEMPLATE, *, eos: str = "<|eot_id|>"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 256 bytes, 25 merges and `SPECIALS` (289 ids, the specials last)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in _MERGES)]
    words = [*alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin_of_text|>",
        eos_token=eos,
        pad_token="<|end_of_text|>",
        mask_token="<|mask|>",
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def toy_config(
    *, layers: int = 6, hidden: int = 64, vocab: int = 289, tied: bool = True, max_length: int = 512
) -> LlamaConfig:
    """A Llama of 4 query and 2 key heads."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=max_length,
        tie_word_embeddings=tied,
        # Large enough for answers that differ from prompt to prompt.
        initializer_range=0.2,
        bos_token_id=281,
        eos_token_id=285,
        pad_token_id=282,
    )


def toy_target_folder(
    path: Path,
    *,
    layers: int = 6,
    hidden: int = 64,
    vocab: int | None = None,
    tied: bool = True,
    max_length: int = 512,
    seed: int = 0,
    chat_template: str | None = LLAMA3_TEMPLATE,
) -> Path:
    """Saves a random float32 Llama with its tokenizer and generation config; returns `path`.

    The same arguments give the same weights. `vocab` (default: the tokenizer's 289) may be larger.
    """
    tokenizer = toy_tokenizer(chat_template)
    config = toy_config(
        layers=layers,
        hidden=hidden,
        vocab=vocab or len(tokenizer),
        tied=tied,
        max_length=max_length,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    stops = tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<|end_of_text|>"])
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stops, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
