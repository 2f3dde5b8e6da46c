"""The loss mask on templates that show where an answer ends, and on others."""

from __future__ import annotations

import pytest

from draftlab.progress import Monitor
from draftlab.text.chat_template import RenderError, prompt_ids
from draftlab.text.conversations import Conversation
from draftlab.text.samples import build_samples
from tests.helpers.assistant_turns import assistant_turns
from tests.helpers.messages import assistant, user
from tests.helpers.toys import CHATML_TEMPLATE, LLAMA3_TEMPLATE, toy_tokenizer

# As in Mistral: no header before an answer, so adjacent answers touch.
NO_HEADER = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '[' + message['content'] + ']' }}
    {%- endif %}
{%- endfor %}"""
NO_CLOSING_TAG = (
    "{% for m in messages %}{{ '# ' + m['role'] + '\n' + m['content'] + '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '# assistant\n' }}{% endif %}"
)
# As in Phi-3: an end of text after the last turn only.
END_OF_TEXT = CHATML_TEMPLATE.replace(
    "{%- endif %}", "{%- else %}{{- '<|end_of_text|>' }}{%- endif %}"
)
# As in Qwen3: an empty <think> block in the last answer only, but not in the generation prompt.
EMPTY_THINK = CHATML_TEMPLATE.replace(
    "+ '\\n' + message['content'] +",
    "+ '\\n' + ('<think></think>' if loop.last and message['role'] == 'assistant' else '')"
    " + message['content'] +",
)
# Tokens between a header and an answer: special ones alone may be there.
BEFORE_ANSWER = (("<|im_start|>a<|im_end|>", True), ("a<|im_end|>", False), ("<|im_end|>a", False))
DROPS_HISTORY = CHATML_TEMPLATE.replace(
    "+ message['content'] +", "+ (message['content'] if loop.last else '…') +"
)
DROPS_CONTENT = CHATML_TEMPLATE.replace("+ message['content'] ", "")

CHAT = [
    {"role": "system", "content": "be kind"},
    user("first?"),
    assistant("the\none 日本語"),
    user("second?"),
    assistant("two"),
]
ANSWERS = ["the\none 日本語", "two"]
CALL = {"tool_calls": [{"function": {"name": "add", "arguments": {}}}]}


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (LLAMA3_TEMPLATE, "<|eot_id|>"),
        (CHATML_TEMPLATE, "<|im_end|>"),
        (END_OF_TEXT, "<|im_end|>"),
        (NO_HEADER, "<|eot_id|>"),
        (NO_CLOSING_TAG, ""),  # the last visible character ends the answer
    ],
)
def test_answers_end_with_their_closing_tag(template, tag):
    tokenizer = toy_tokenizer(template)
    turns = assistant_turns(tokenizer, CHAT)
    assert [tokenizer.decode(turn.token_ids) for turn in turns] == [text + tag for text in ANSWERS]
    whole = tokenizer.apply_chat_template(CHAT)["input_ids"]
    for turn, index in zip(turns, (2, 4), strict=True):
        assert turn.prompt_ids == prompt_ids(tokenizer, CHAT[:index])
        ids = [*turn.prompt_ids, *turn.token_ids]
        assert whole[: len(ids)] == ids


def test_the_mask_equals_the_one_from_transformers():
    tokenizer = toy_tokenizer(LLAMA3_TEMPLATE)
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    (sample,) = build_samples([Conversation("c", CHAT, "s")], tokenizer, Monitor())
    assert [int(span > 0) for span in sample.spans] == out["assistant_masks"]


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, CHATML_TEMPLATE])
def test_an_empty_answer_is_its_closing_tag(template):
    (turn,) = assistant_turns(toy_tokenizer(template), [user(""), assistant("")])
    assert len(turn.token_ids) == 1


def test_adjacent_answers_are_distinct():
    tokenizer = toy_tokenizer(NO_HEADER)
    first, second = assistant_turns(tokenizer, [*CHAT[:3], assistant("and more")])
    assert second.prompt_ids == first.prompt_ids + first.token_ids


def test_a_conversation_without_an_answer_has_no_turns():
    assert assistant_turns(toy_tokenizer(), CHAT[:2]) == []


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (DROPS_HISTORY, CHAT, "rewrites history"),
        (EMPTY_THINK, CHAT[:3], "begin and end: after the generation prompt"),
        (DROPS_CONTENT, CHAT[:3], "generation prompt it writes"),
        (CHATML_TEMPLATE + "{{ raise_exception('no system') }}", CHAT, "no system"),
        (CHATML_TEMPLATE, [user("a"), assistant("\n\nb")], "shares a token with its prompt"),
        (LLAMA3_TEMPLATE, [CHAT[1], assistant("two") | {"reasoning_content": "hm"}], "hm"),
        (LLAMA3_TEMPLATE, [CHAT[1], assistant("") | CALL], "add"),
    ],
)
def test_an_unreliable_mask_is_an_error_that_names_the_conversation(template, chat, reason):
    with pytest.raises(RenderError, match="conversation c7") as caught:
        assistant_turns(toy_tokenizer(template), chat, where="conversation c7")
    assert reason in caught.value.what
    assert caught.value.do


@pytest.mark.parametrize(("between", "accepted"), BEFORE_ANSWER)
def test_only_a_header_of_special_tokens_may_precede_an_answer(between, accepted):
    tokenizer = toy_tokenizer(EMPTY_THINK.replace("<think></think>", between))
    if accepted:
        (turn,) = assistant_turns(tokenizer, [user("q"), assistant("two")])
        assert tokenizer.decode(turn.token_ids) == between + "two<|im_end|>"
        return
    with pytest.raises(RenderError, match="after the generation prompt it writes"):
        assistant_turns(tokenizer, [user("q"), assistant("two")])


def test_masks_of_later_conversations_do_not_list_the_added_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tokenizer such as Gemma's has 6,400 of them: listing them took 12 ms an answer."""
    tokenizer, chat = toy_tokenizer(), [user("q"), assistant("a")]
    turns = assistant_turns(tokenizer, chat)
    monkeypatch.setattr(
        type(tokenizer), "added_tokens_decoder", property(lambda _: pytest.fail("lists tokens"))
    )
    assert assistant_turns(tokenizer, chat) == turns
