"""Spans from markers and from prefixes, on templates that help and templates that don't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from draftlab.errors import UserError
from draftlab.text.render import (
    Rendered,
    RenderError,
    coloured,
    prompt_ids,
    render,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)
from tests.helpers.toys import CHATML_TEMPLATE, LLAMA3_TEMPLATE, toy_tokenizer


def unmarked(template: str) -> str:
    """The same template without its generation markers."""
    return template.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


CHATML_MARKED = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {{- message['content'] + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
CHATML_TAG_OUTSIDE = CHATML_MARKED.replace(
    "+ '<|im_end|>\\n' }}\n        {%- endgeneration %}",
    "}}\n        {%- endgeneration %}\n        {{- '<|im_end|>\\n' }}",
)
# Mistral: no header before an answer, so adjacent answers touch.
BARE = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- '[' + message['content'] + ']' }}
    {%- endif %}
{%- endfor %}"""
# Phi-3: an end of text after the last turn only.
PHI = CHATML_TEMPLATE.replace("{%- endif %}", "{%- else %}{{- '<|end_of_text|>' }}{%- endif %}")
# Qwen3: empty thoughts in the last answer only, which the prompt does not announce.
THINKING = CHATML_TEMPLATE.replace(
    "+ '\\n' + message['content'] +",
    "+ '\\n' + ('<think></think>' if loop.last and message['role'] == 'assistant' else '')"
    " + message['content'] +",
)
# Drops earlier answers.
FORGETFUL = CHATML_TEMPLATE.replace(
    "+ message['content'] +", "+ (message['content'] if loop.last else '…') +"
)

CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "first?"},
    {"role": "assistant", "content": "the\none 日本語"},
    {"role": "user", "content": "second?"},
    {"role": "assistant", "content": "two"},
]


def answers(tokenizer, rendered: Rendered) -> list[str]:
    """The text of each span."""
    count = max(rendered.spans, default=0)
    return [
        tokenizer.decode(
            [t for t, s in zip(rendered.token_ids, rendered.spans, strict=True) if s == n]
        )
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("template", "tag"),
    [
        (LLAMA3_TEMPLATE, "<|eot_id|>"),
        (unmarked(LLAMA3_TEMPLATE), "<|eot_id|>"),
        (CHATML_TEMPLATE, "<|im_end|>"),
        (CHATML_MARKED, "<|im_end|>"),
        (CHATML_TAG_OUTSIDE, "<|im_end|>"),
        (PHI, "<|im_end|>"),
        (BARE, "<|eot_id|>"),
        (unmarked(BARE), "<|eot_id|>"),
    ],
)
def test_spans_are_answers_with_their_closing_tag_and_nothing_after_it(template, tag):
    tokenizer = toy_tokenizer(template)
    rendered = render(tokenizer, CHAT)
    assert answers(tokenizer, rendered) == ["the\none 日本語" + tag, "two" + tag]
    assert list(rendered.token_ids) == tokenizer.apply_chat_template(CHAT)["input_ids"]
    for number, turn in ((1, 2), (2, 4)):
        prompt = prompt_ids(tokenizer, CHAT[:turn])
        assert rendered.token_ids[: len(prompt)] == prompt
        assert rendered.spans.index(number) == len(prompt)


def test_markers_agree_with_the_mask_transformers_makes():
    tokenizer = toy_tokenizer(LLAMA3_TEMPLATE)
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert [int(s > 0) for s in render(tokenizer, CHAT).spans] == out["assistant_masks"]


def test_a_template_without_closing_tag_ends_the_span_at_the_last_visible_character():
    template = (
        "{% for m in messages %}{{ '# ' + m['role'] + '\n' + m['content'] + '\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '# assistant\n' }}{% endif %}"
    )
    tokenizer = toy_tokenizer(template)
    assert answers(tokenizer, render(tokenizer, CHAT)) == ["the\none 日本語", "two"]


@pytest.mark.parametrize("template", [BARE, unmarked(BARE), LLAMA3_TEMPLATE, CHATML_TEMPLATE])
def test_adjacent_answers_are_distinct_spans(template):
    tokenizer = toy_tokenizer(template)
    chat = [*CHAT[:3], {"role": "assistant", "content": "and more"}]
    found = answers(tokenizer, render(tokenizer, chat))
    assert [text.split("<|")[0] for text in found] == ["the\none 日本語", "and more"]
    if template == BARE:
        spans = render(tokenizer, chat).spans
        assert spans[spans.index(2) - 1] == 1


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, unmarked(LLAMA3_TEMPLATE), CHATML_TEMPLATE])
def test_an_empty_answer_is_its_closing_tag(template):
    tokenizer = toy_tokenizer(template)
    chat = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    assert sum(render(tokenizer, chat).spans) == 1


def test_without_an_answer_nothing_is_in_a_span():
    assert set(render(toy_tokenizer(), CHAT[:2]).spans) == {0}


@pytest.mark.parametrize(
    ("template", "chat", "reason"),
    [
        (FORGETFUL, CHAT, "rewrites history"),
        (THINKING, CHAT[:3], "no {% generation %} markers, and after the generation prompt"),
        (
            CHATML_TEMPLATE.replace("+ message['content'] ", ""),
            CHAT[:3],
            "generation prompt it writes",
        ),
        (CHATML_TEMPLATE + "{{ raise_exception('no system') }}", CHAT, "no system"),
    ],
)
def test_what_cannot_be_trusted_is_an_error_that_names_the_conversation(template, chat, reason):
    with pytest.raises(RenderError, match="conversation c7") as caught:
        render(toy_tokenizer(template), chat, where="conversation c7")
    assert reason in caught.value.what
    assert caught.value.do


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, unmarked(LLAMA3_TEMPLATE)])
@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"content": "two", "reasoning_content": "hm"}, "hm"),
        ({"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}, "add"),
    ],
)
def test_a_template_that_leaves_out_reasoning_or_a_call_is_an_error(template, answer, what):
    chat = [CHAT[1], {"role": "assistant", **answer}]
    with pytest.raises(RenderError, match=what):
        render(toy_tokenizer(template), chat)


def test_an_answer_that_melts_with_the_prompt_is_an_error():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\n\nb"}]
    with pytest.raises(RenderError, match="melts"):
        render(toy_tokenizer(CHATML_TEMPLATE), chat)


def test_an_answer_whose_tokens_change_when_the_conversation_goes_on_is_an_error():
    template = (
        "{% for m in messages %}{{ '#' + m['role'] + '\n' + m['content'] }}"
        "{{ 'nt' if not loop.last or add_generation_prompt else '' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '#assistant\n' }}{% endif %}"
    )
    chat = [{"role": r, "content": "a"} for r in ("user", "assistant", "user")]
    render(toy_tokenizer(template), chat[:2])
    with pytest.raises(RenderError, match="other tokens when the conversation goes on"):
        render(toy_tokenizer(template), chat)


def test_markers_that_enclose_the_header_fall_back_to_prefixes():
    template = CHATML_MARKED.replace("{{- '<|im_start|>assistant\\n' }}", "", 1).replace(
        "{{- message['content'] + '<|im_end|>\\n' }}",
        "{{- '<|im_start|>assistant\\n' + message['content'] + '<|im_end|>\\n' }}",
    )
    tokenizer = toy_tokenizer(template)
    assert answers(tokenizer, render(tokenizer, CHAT))[1] == "two<|im_end|>"


def test_a_target_without_a_template_is_an_error():
    with pytest.raises(UserError, match="chat template"):
        render(toy_tokenizer(None), CHAT)


TURNS = st.lists(
    st.tuples(
        st.sampled_from(["user", "assistant"]),
        st.text(st.sampled_from("ab \n\té日👩‍\u2028#<|"), max_size=8)
        | st.sampled_from(["", " ", "\n\n", "<|im_end|>", "the def", " x<|eot_id|>y "]),
    ),
    max_size=5,
)


@pytest.mark.parametrize("template", [LLAMA3_TEMPLATE, CHATML_MARKED, BARE])
@settings(max_examples=120, deadline=None)
@given(turns=TURNS)
def test_prefixes_and_markers_agree(template, turns):
    chat = [{"role": "user", "content": "go"}, *({"role": r, "content": c} for r, c in turns)]

    def outcome(source: str) -> Rendered | None:
        try:
            return render(toy_tokenizer(source), chat)
        except RenderError:
            return None

    by_markers = outcome(template)
    assert by_markers == outcome(unmarked(template))
    if by_markers is not None:
        wrote = sum(message["role"] == "assistant" for message in chat)
        assert set(by_markers.spans) - {0} == set(range(1, wrote + 1))


def test_identities_change_with_what_they_name():
    llama = toy_tokenizer()
    assert template_sha256(llama) != template_sha256(toy_tokenizer(CHATML_TEMPLATE))
    assert tokenizer_sha256(llama) == tokenizer_sha256(toy_tokenizer(CHATML_TEMPLATE))
    other = toy_tokenizer()
    other.add_tokens(["<more>"])
    assert tokenizer_sha256(llama) != tokenizer_sha256(other)


def test_stop_ids_join_tokenizer_and_generation_config(tmp_path: Path):
    tokenizer = toy_tokenizer()
    assert stop_ids(tokenizer, None) == {285}
    assert stop_ids(tokenizer, GenerationConfig(eos_token_id=[282, 285])) == {282, 285}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 287}))
    assert stop_ids(tokenizer, tmp_path) == {285, 287}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 282}))
    assert stop_ids(tokenizer, tmp_path) == {282, 285}
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="eos_token_id"):
        stop_ids(tokenizer, None)


def test_coloured_shows_every_token_and_colours_only_answers():
    tokenizer = toy_tokenizer()
    rendered = render(tokenizer, CHAT[:3])
    text = coloured(rendered, tokenizer)
    assert len(text.spans) == len(rendered.token_ids)
    assert [("green" in str(part.style)) for part in text.spans] == [s > 0 for s in rendered.spans]
    assert "first?" in text.plain
    assert "⏎" in text.plain
