"""Masks on the chat templates of public model families: which tokens are an answer, one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from draftlab.progress import Monitor
from draftlab.target_model.model import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text.conversations import Conversation
from draftlab.text.render import RenderError, prompt_ids, render, template_sha256, turns
from draftlab.text.samples import samples
from tests.helpers.template_families import FAMILIES, QWEN3, family_tokenizer
from tests.helpers.toys import toy_tokenizer

ASK, AGAIN = {"role": "user", "content": "two and two"}, {"role": "user", "content": "sure"}
FOUR, YES = {"role": "assistant", "content": "four"}, {"role": "assistant", "content": "yes sir"}
THINK = {**FOUR, "reasoning_content": "easy sum"}
THINK_AGAIN = {**YES, "reasoning_content": "no doubt"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": {"b": 2}}}}],
}
THINK_CALL = {**CALL, "reasoning_content": "add them"}
RESULT = {"role": "tool", "name": "add", "content": "4"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {}}},)


def tokenizer_for(family: str, arguments: dict[str, Any] | None = None):
    words = json.dumps([ASK, AGAIN, THINK, THINK_AGAIN, THINK_CALL, RESULT, SYSTEM, TOOLS])
    tokenizer = family_tokenizer(family, words)
    settings = TargetSettings(template_arguments=arguments or {})
    tokenizer.chat_template = settings.template(tokenizer.chat_template)
    return tokenizer


def pieces(text: str) -> list[str]:
    """Tokens of a text written with ¦ between them."""
    return [piece.replace("⏎", "\n") for piece in text.split("¦")]


QWEN_CALL = (
    '<tool_call>¦⏎¦{¦"¦name¦"¦:¦ ¦"¦add¦"¦,¦ ¦"¦arguments¦"¦:¦ ¦'
    '{¦"¦a¦"¦:¦ ¦{¦"¦b¦"¦:¦ ¦2¦}¦}¦}¦⏎¦</tool_call>¦<|im_end|>'
)
LLAMA_CALL = '{¦"¦name¦"¦:¦ ¦"¦add¦"¦,¦ ¦"¦parameters¦"¦:¦ ¦{¦"¦a¦"¦:¦ ¦{¦"¦b¦"¦:¦ ¦2¦}¦}¦}¦'
# Family, the template's arguments, messages, tokens of every answer.
CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[str]]] = [
    ("llama3", {}, [SYSTEM, ASK, FOUR, AGAIN, YES], ["four¦<|eot_id|>", "yes¦ ¦sir¦<|eot_id|>"]),
    (
        "llama3",
        {"date_string": "sure"},
        [ASK, CALL, RESULT, FOUR],
        [LLAMA_CALL + "<|eot_id|>", "four¦<|eot_id|>"],
    ),
    ("llama4", {}, [SYSTEM, ASK, FOUR, AGAIN, YES], ["four¦<|eot|>", "yes¦ ¦sir¦<|eot|>"]),
    (
        "llama4",
        {},
        [ASK, CALL, RESULT, FOUR],
        ["<|python_start|>¦<|python_end|>¦" + LLAMA_CALL + "<|eot|>", "four¦<|eot|>"],
    ),
    ("qwen2.5", {}, [ASK, FOUR, AGAIN, YES], ["four¦<|im_end|>", "yes¦ ¦sir¦<|im_end|>"]),
    ("qwen2.5", {}, [SYSTEM, ASK, CALL, RESULT, FOUR], [QWEN_CALL, "four¦<|im_end|>"]),
    (
        "qwen3",
        {},
        [ASK, THINK, AGAIN, THINK_AGAIN],
        [
            "<think>¦⏎¦easy¦ ¦sum¦⏎¦</think>¦⏎⏎¦four¦<|im_end|>",
            "<think>¦⏎¦no¦ ¦doubt¦⏎¦</think>¦⏎⏎¦yes¦ ¦sir¦<|im_end|>",
        ],
    ),
    (
        "qwen3",
        {},
        [ASK, {"role": "assistant", "content": "<think>\neasy sum\n</think>\n\nfour"}],
        ["<think>¦⏎¦easy¦ ¦sum¦⏎¦</think>¦⏎⏎¦four¦<|im_end|>"],
    ),
    (
        "qwen3",
        {"enable_thinking": False},
        [ASK, FOUR, AGAIN, YES],
        ["four¦<|im_end|>", "yes¦ ¦sir¦<|im_end|>"],
    ),
    (
        "qwen3",
        {},
        [ASK, THINK_CALL, RESULT, THINK],
        [
            "<think>¦⏎¦add¦ ¦them¦⏎¦</think>¦⏎⏎¦" + QWEN_CALL,
            "<think>¦⏎¦easy¦ ¦sum¦⏎¦</think>¦⏎⏎¦four¦<|im_end|>",
        ],
    ),
    (
        "gpt-oss",
        {},
        [SYSTEM, ASK, THINK, AGAIN, THINK_AGAIN],
        [
            "<|channel|>¦analysis¦<|message|>¦easy¦ ¦sum¦<|end|>¦<|start|>¦assistant¦"
            "<|channel|>¦final¦<|message|>¦four¦<|return|>",
            "<|channel|>¦analysis¦<|message|>¦no¦ ¦doubt¦<|end|>¦<|start|>¦assistant¦"
            "<|channel|>¦final¦<|message|>¦yes¦ ¦sir¦<|return|>",
        ],
    ),
    (
        "gpt-oss",
        {"reasoning_effort": "low"},
        [ASK, FOUR],
        ["<|channel|>¦final¦<|message|>¦four¦<|return|>"],
    ),
    (
        "gpt-oss",
        {},
        [ASK, THINK_CALL, RESULT, THINK],
        [
            "<|channel|>¦analysis¦<|message|>¦add¦ ¦them¦<|end|>¦<|start|>¦assistant¦ ¦to¦=¦"
            "functions¦.¦add¦<|channel|>¦commentary¦ ¦json¦<|message|>¦"
            '{¦"¦a¦"¦:¦ ¦{¦"¦b¦"¦:¦ ¦2¦}¦}¦<|call|>',
            "<|channel|>¦analysis¦<|message|>¦easy¦ ¦sum¦<|end|>¦<|start|>¦assistant¦"
            "<|channel|>¦final¦<|message|>¦four¦<|return|>",
        ],
    ),
    (
        "gemma",
        {},
        [SYSTEM, ASK, FOUR, AGAIN, YES],
        ["four¦<end_of_turn>", "yes¦ ¦sir¦<end_of_turn>"],
    ),
    ("mistral", {}, [ASK, FOUR, AGAIN, YES], [" ¦four¦</s>", " ¦yes¦ ¦sir¦</s>"]),
    (
        "mistral",
        {},
        [ASK, CALL, RESULT, FOUR],
        [
            '[TOOL_CALLS]¦ ¦[¦{¦"¦name¦"¦:¦ ¦"¦add¦"¦,¦ ¦"¦arguments¦"¦:¦ ¦'
            '{¦"¦a¦"¦:¦ ¦{¦"¦b¦"¦:¦ ¦2¦}¦}¦}¦]¦</s>',
            " ¦four¦</s>",
        ],
    ),
    (
        "deepseek-v3",
        {},
        [SYSTEM, ASK, FOUR, AGAIN, YES],
        ["four¦<｜end▁of▁sentence｜>", "yes¦ ¦sir¦<｜end▁of▁sentence｜>"],
    ),
    (
        "deepseek-v3.1",
        {},
        [ASK, FOUR, AGAIN, YES],
        ["four¦<｜end▁of▁sentence｜>", "yes¦ ¦sir¦<｜end▁of▁sentence｜>"],
    ),
]


@pytest.mark.parametrize(("family", "arguments", "chat", "expected"), CASES)
def test_answers_token_by_token(family, arguments, chat, expected) -> None:
    tokenizer = tokenizer_for(family, arguments)
    found = turns(tokenizer, chat, TOOLS if CALL in chat or THINK_CALL in chat else None)
    said = [tokenizer.convert_ids_to_tokens(list(turn.token_ids)) for turn in found]
    assert said == [pieces(text) for text in expected]
    assert tokenizer.unk_token_id not in [i for turn in found for i in turn.prompt_ids]
    # What each answers to is what the target would have read.
    places = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    for place, turn in zip(places, found, strict=True):
        asked = tokenizer.apply_chat_template(
            [{**m, "thinking": m.get("reasoning_content")} for m in chat[:place]],
            tools=TOOLS if CALL in chat or THINK_CALL in chat else None,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert list(turn.prompt_ids) == list(asked)


@pytest.mark.parametrize(
    ("family", "arguments", "chat", "lengths"),
    [
        # One sample where history stands as it was written, else one for each answer.
        ("llama3", {}, [ASK, FOUR, AGAIN, YES], [2]),
        ("mistral", {}, [ASK, FOUR, AGAIN, YES], [2]),
        ("qwen3", {}, [ASK, THINK, AGAIN, THINK_AGAIN], [1, 1]),  # earlier reasoning is dropped
        ("qwen3", {}, [ASK, THINK_CALL, RESULT, THINK], [2]),  # kept between tool calls
        ("qwen3", {"enable_thinking": False}, [ASK, FOUR, AGAIN, YES], [1, 1]),
        ("gpt-oss", {}, [ASK, THINK, AGAIN, THINK_AGAIN], [1, 1]),  # and <|return|> becomes <|end|>
        ("gpt-oss", {}, [ASK, THINK_CALL, RESULT, THINK], [2]),
    ],
)
def test_a_conversation_is_as_few_samples_as_its_history_allows(
    family, arguments, chat, lengths
) -> None:
    tokenizer = tokenizer_for(family, arguments)
    tools = TOOLS if THINK_CALL in chat else ()
    found = samples([Conversation("c", chat, "s", tools=tools)], tokenizer, Monitor())
    assert [len(set(s.spans) - {0}) for s in found] == lengths
    assert [s.id for s in found] == ["c", "c#2"][: len(lengths)]
    said = [turn.token_ids for turn in turns(tokenizer, chat, tools)]
    spans = [
        tuple(t for t, s in zip(sample.token_ids, sample.spans, strict=True) if s == n)
        for sample in found
        for n in sorted(set(sample.spans) - {0})
    ]
    assert spans == said
    if len(lengths) == 2:
        with pytest.raises(RenderError, match="when the conversation goes on"):
            render(tokenizer, chat, tools)


@pytest.mark.parametrize(
    ("family", "chat", "words"),
    [
        # A thinking target never writes an empty thought: enable_thinking belongs off.
        ("qwen3", [ASK, FOUR], "'<think>\\n\\n</think>\\n\\nfour"),
        ("llama3", [ASK, THINK], "where the reasoning is 'easy sum'"),
        ("deepseek-r1", [ASK, FOUR], "rewrites history"),
        ("deepseek-r1", [ASK, {**FOUR, "content": "<think>\neasy sum\n</think>four"}], "history"),
        ("gemma", [ASK, ASK, FOUR], "must alternate"),
        # The system's words stand before the last user's only, so they go when it is answered.
        ("mistral", [SYSTEM, ASK, FOUR], "'be brief"),
    ],
)
def test_what_a_template_does_not_write_is_an_error(family, chat, words) -> None:
    with pytest.raises(RenderError) as caught:
        turns(tokenizer_for(family), chat, where="c")
    assert words in caught.value.what
    assert caught.value.where == "c"


def test_a_recipes_template_arguments_reach_prompts_and_identity(tmp_path: Path) -> None:
    toy_tokenizer(QWEN3).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    plain = load_tokenizer(TargetSettings(path=str(tmp_path)))
    off = load_tokenizer(
        TargetSettings(path=str(tmp_path), template_arguments={"enable_thinking": False})
    )
    assert off.decode(prompt_ids(off, [ASK])) == (
        plain.decode(prompt_ids(plain, [ASK])) + "<think>\n\n</think>\n\n"
    )
    assert template_sha256(off) != template_sha256(plain)
    with pytest.raises(ValidationError, match="pattern"):
        TargetSettings(template_arguments={"a b": 1})


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"deepseek-r1", "qwen3"}))
def test_empty_answers_and_any_characters(family) -> None:
    tokenizer = tokenizer_for(family)
    empty = turns(tokenizer, [ASK, {**FOUR, "content": ""}])[0].token_ids
    assert tokenizer.convert_ids_to_tokens(empty[-1]) == FAMILIES[family].control[0]
    assert len([i for i in empty if i in tokenizer.all_special_ids]) >= 1
    odd = {**FOUR, "content": "naïve “日本語” 👩‍💻\u2028<b>"}
    found = turns(tokenizer, [ASK, odd, AGAIN, YES])
    assert tokenizer.convert_ids_to_tokens(found[1].token_ids[-1]) == FAMILIES[family].control[0]
