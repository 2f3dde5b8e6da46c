"""The loss mask on the chat templates of public models, token by token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftlab.progress import Monitor
from draftlab.text.chat_template import RenderError
from draftlab.text.conversations import Conversation
from draftlab.text.samples import build_samples
from tests.helpers.assistant_turns import assistant_turns
from tests.helpers.template_families import FAMILIES, family_tokenizer

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


def tokenizer_for(family: str):
    words = json.dumps([ASK, AGAIN, THINK, THINK_AGAIN, THINK_CALL, RESULT, SYSTEM, TOOLS])
    return family_tokenizer(family, words)


def tokens(text: str) -> list[str]:
    """Return the tokens of a text that is written with ¦ between them."""
    return [token.replace("⏎", "\n") for token in text.split("¦")]


QWEN_CALL = (
    '<tool_call>¦⏎¦{¦"¦name¦"¦:¦ ¦"¦add¦"¦,¦ ¦"¦arguments¦"¦:¦ ¦'
    '{¦"¦a¦"¦:¦ ¦{¦"¦b¦"¦:¦ ¦2¦}¦}¦}¦⏎¦</tool_call>¦<|im_end|>'
)
LLAMA_CALL = '{¦"¦name¦"¦:¦ ¦"¦add¦"¦,¦ ¦"¦parameters¦"¦:¦ ¦{¦"¦a¦"¦:¦ ¦{¦"¦b¦"¦:¦ ¦2¦}¦}¦}¦'
PLAIN = {
    "llama3": "<|eot_id|>",
    "llama4": "<|eot|>",
    "qwen2.5": "<|im_end|>",
    "gemma4": "<turn|>",
    **dict.fromkeys(("deepseek-v3", "deepseek-v3.1"), "<｜end▁of▁sentence｜>"),
    "gemma": "<end_of_turn>",
}
"""What ends answers that have nothing else around them."""
# Family, template arguments, messages, the tokens of each answer.
CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]], list[str]]] = [
    *(
        (family, {}, [SYSTEM, ASK, FOUR, AGAIN, YES], [f"four¦{end}", f"yes¦ ¦sir¦{end}"])
        for family, end in PLAIN.items()
    ),
    (
        "llama3",
        {"date_string": "sure"},
        [ASK, CALL, RESULT, FOUR],
        [LLAMA_CALL + "<|eot_id|>", "four¦<|eot_id|>"],
    ),
    (
        "llama4",
        {},
        [ASK, CALL, RESULT, FOUR],
        ["<|python_start|>¦<|python_end|>¦" + LLAMA_CALL + "<|eot|>", "four¦<|eot|>"],
    ),
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
    ("mistral", {}, [ASK, FOUR, AGAIN, YES], [" ¦four¦</s>", " ¦yes¦ ¦sir¦</s>"]),
    # The system prompt precedes the last user turn only, so an answer removes it.
    ("mistral", {}, [SYSTEM, ASK, FOUR, AGAIN, YES], [" ¦four¦</s>", " ¦yes¦ ¦sir¦</s>"]),
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
    # These templates leave the reasoning of every answer out.
    (
        "deepseek-v3.1",
        {"thinking_mode": True},
        [ASK, THINK],
        ["easy¦ ¦sum¦</think>¦four¦<｜end▁of▁sentence｜>"],
    ),
    (
        "deepseek-r1",
        {},
        [ASK, THINK, AGAIN, {**YES, "content": "<think>\nno doubt\n</think>\n\nyes sir"}],
        [
            "easy¦ ¦sum¦⏎¦</think>¦⏎⏎¦four¦<｜end▁of▁sentence｜>",
            "no¦ ¦doubt¦⏎¦</think>¦⏎⏎¦yes¦ ¦sir¦<｜end▁of▁sentence｜>",
        ],
    ),
    # The turn of the user that follows an answer begins with the token that ends it.
    (
        "glm4.5",
        {},
        [ASK, THINK, AGAIN, THINK_AGAIN],
        [
            "⏎¦<think>¦easy¦ ¦sum¦</think>¦⏎¦four¦<|user|>",
            "⏎¦<think>¦no¦ ¦doubt¦</think>¦⏎¦yes¦ ¦sir¦<|user|>",
        ],
    ),
    ("qwq", {}, [ASK, THINK], ["easy¦ ¦sum¦⏎¦</think>¦⏎⏎¦four¦<|im_end|>"]),
    (
        "gemma4",
        {"enable_thinking": True},
        [ASK, THINK],
        ["<|channel>¦thought¦⏎¦easy¦ ¦sum¦⏎¦<channel|>¦four¦<turn|>"],
    ),
    (
        "kimi-k3",
        {},
        [ASK, THINK],
        [
            "easy¦ ¦sum¦<|close|>¦think¦<|sep|>¦<|open|>¦response¦<|sep|>¦four¦<|close|>¦response"
            "¦<|sep|>¦<|close|>¦message¦<|sep|>¦<|end_of_msg|>"
        ],
    ),
]


@pytest.mark.parametrize(("family", "arguments", "chat", "expected"), CASES)
def test_answers_token_by_token(family, arguments, chat, expected) -> None:
    tokenizer = tokenizer_for(family)
    tools = TOOLS if CALL in chat or THINK_CALL in chat else None
    turns = assistant_turns(tokenizer, chat, tools, arguments)
    answers = [tokenizer.convert_ids_to_tokens(list(turn.token_ids)) for turn in turns]
    assert answers == [tokens(text) for text in expected]
    assert tokenizer.unk_token_id not in [i for turn in turns for i in turn.prompt_ids]
    indices = [i for i, message in enumerate(chat) if message["role"] == "assistant"]
    for index, turn in zip(indices, turns, strict=True):
        prompt = tokenizer.apply_chat_template(
            [{**m, "thinking": m.get("reasoning_content")} for m in chat[:index]],
            tools=tools,
            add_generation_prompt=True,
            return_dict=False,
            **arguments,
        )
        assert list(turn.prompt_ids) == list(prompt)


def test_a_template_that_reads_parts_alone_gets_them() -> None:
    tokenizer = tokenizer_for("idefics3")
    first, second = assistant_turns(tokenizer, [ASK, FOUR, AGAIN, YES])
    assert tokenizer.decode(first.prompt_ids).startswith("<bos>user: two and two<end_of_utterance>")
    assert tokenizer.decode(first.token_ids) == " four<end_of_utterance>"
    assert second.prompt_ids[: len(first.prompt_ids + first.token_ids)] == (
        first.prompt_ids + first.token_ids
    )


@pytest.mark.parametrize(
    ("family", "arguments", "chat", "lengths"),
    [
        # One sample if the template keeps the history as it was written, else one per answer.
        ("llama3", {}, [ASK, FOUR, AGAIN, YES], [2]),
        ("mistral", {}, [ASK, FOUR, AGAIN, YES], [2]),
        ("mistral", {}, [SYSTEM, ASK, FOUR, AGAIN, YES], [1, 1]),
        ("qwen3", {}, [ASK, THINK, AGAIN, THINK_AGAIN], [1, 1]),  # earlier reasoning is dropped
        ("qwen3", {}, [ASK, THINK_CALL, RESULT, THINK], [2]),  # kept between tool calls
        ("qwen3", {"enable_thinking": False}, [ASK, FOUR, AGAIN, YES], [1, 1]),
        ("gpt-oss", {}, [ASK, THINK, AGAIN, THINK_AGAIN], [1, 1]),  # and <|return|> becomes <|end|>
        ("gpt-oss", {}, [ASK, THINK_CALL, RESULT, THINK], [2]),
    ],
)
def test_answers_share_a_sample_if_the_template_keeps_history(
    family, arguments, chat, lengths
) -> None:
    tokenizer = tokenizer_for(family)
    tools = TOOLS if THINK_CALL in chat else ()
    conversations = [Conversation("c", chat, "s", tools=tools, template_arguments=arguments)]
    samples = list(build_samples(conversations, tokenizer, Monitor()))
    assert [len(set(s.spans) - {0}) for s in samples] == lengths
    assert [s.id for s in samples] == ["c", "c#2"][: len(lengths)]
    spans = [
        tuple(t for t, s in zip(sample.token_ids, sample.spans, strict=True) if s == n)
        for sample in samples
        for n in sorted(set(sample.spans) - {0})
    ]
    assert spans == [turn.token_ids for turn in assistant_turns(tokenizer, chat, tools, arguments)]


@pytest.mark.parametrize(
    ("family", "chat", "words"),
    [
        # A reasoning target never writes an empty <think> block: enable_thinking must be off.
        ("qwen3", [ASK, FOUR], "'<think>\\n\\n</think>\\n\\nfour"),
        ("llama3", [ASK, THINK], "where the reasoning is 'easy sum'"),
        ("deepseek-r1", [ASK, FOUR], "rewrites history"),
        ("gemma4", [ASK, THINK], "rewrites history"),  # enable_thinking must be on
        ("gemma", [ASK, ASK, FOUR], "must alternate"),
    ],
)
def test_an_answer_that_the_template_does_not_write_is_an_error(family, chat, words) -> None:
    with pytest.raises(RenderError) as caught:
        assistant_turns(tokenizer_for(family), chat, where="c")
    assert words in caught.value.what
    assert caught.value.where == "c"


NO_EMPTY_ANSWERS = {"deepseek-r1", "gemma4", "glm4.5", "qwen3", "qwq"}
"""Families whose generation prompt is not what the template writes before such an answer."""


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - NO_EMPTY_ANSWERS))
def test_empty_answers_and_any_characters(family) -> None:
    tokenizer, closing_tag = tokenizer_for(family), FAMILIES[family].special[0]
    unusual = {**FOUR, "content": "naïve “日本語” 👩‍💻\u2028<b>"}
    empty = assistant_turns(tokenizer, [ASK, {**FOUR, "content": ""}])
    for turns in (empty, assistant_turns(tokenizer, [ASK, unusual, AGAIN, YES])):
        assert tokenizer.convert_ids_to_tokens(turns[-1].token_ids[-1]) == closing_tag
