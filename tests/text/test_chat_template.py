"""What depends on the chat template and tokenizer: hashes, stop ids, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.recipe.recipe import parse_recipe
from draftlab.text.chat_template import (
    Chat,
    RenderError,
    encode_prompts,
    prompt_ids,
    served_otherwise,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)
from draftlab.text.tokenizer_check import check_tokenizer
from tests.helpers.messages import user
from tests.helpers.template_families import QWEN3
from tests.helpers.toys import CHATML_TEMPLATE, toy_tokenizer


def test_hashes_change_with_what_they_identify():
    llama = toy_tokenizer()
    assert template_sha256(llama) != template_sha256(toy_tokenizer(CHATML_TEMPLATE))
    assert tokenizer_sha256(llama) == tokenizer_sha256(toy_tokenizer(CHATML_TEMPLATE))
    other = toy_tokenizer()
    assert tokenizer_sha256(llama) == tokenizer_sha256(other)
    other.add_tokens(["<more>"])
    assert tokenizer_sha256(llama) != tokenizer_sha256(other)


def test_a_template_that_refuses_the_question_is_not_compared() -> None:
    refusing = toy_tokenizer("{{ raise_exception('a system message comes first') }}")
    for theirs in (None, [5], "text"):
        assert not served_otherwise(refusing, lambda _, theirs=theirs: theirs)
    assert served_otherwise(toy_tokenizer(), lambda _: "text")


def test_a_target_without_a_template_is_an_error():
    with pytest.raises(UserError, match="chat template"):
        prompt_ids(toy_tokenizer(None), [user("q")])


def test_prompts_of_a_batch_keep_their_ids_beside_one_that_cannot_be_rendered() -> None:
    tokenizer = toy_tokenizer(CHATML_TEMPLATE)
    questions = [[user("a")], [], [user("another one")], [], [user("b c")]]
    results = list(encode_prompts(tokenizer, map(Chat, questions)))
    assert [isinstance(one, RenderError) for one in results] == [not q for q in questions]
    for question, result in zip(questions, results, strict=True):
        if question:
            assert result.ids == prompt_ids(tokenizer, question) != ()


def test_stop_ids_join_tokenizer_and_generation_config(tmp_path: Path):
    tokenizer = toy_tokenizer()
    assert stop_ids(tokenizer, None) == {285}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 287}))
    assert stop_ids(tokenizer, tmp_path) == {285, 287}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 282}))
    assert stop_ids(tokenizer, tmp_path) == {282, 285}
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="eos_token_id"):
        stop_ids(tokenizer, None)


@pytest.mark.parametrize(("vocab_size", "warned"), [(289, False), (294, False), (320, True)])
def test_a_tokenizer_of_another_size_is_reported(tmp_path: Path, vocab_size, warned):
    lines = check_tokenizer(toy_tokenizer(), tmp_path, vocab_size, ())
    assert [f"289 tokens and its vocabulary {vocab_size}" in line for line in lines] == [
        True
    ] * warned
    larger = toy_tokenizer()
    larger.add_tokens(["<image>"])  # as Gemma 3 has one beyond its embeddings
    assert check_tokenizer(larger, tmp_path, 289, ()) == []
    larger.add_tokens([f"<more {i}>" for i in range(9)])
    (line,) = check_tokenizer(larger, tmp_path, 289, ())
    assert "299 tokens and its vocabulary 289" in line


def test_stop_tokens_outside_the_vocabulary_and_none_are_errors(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [285, 289, 300]}')
    with pytest.raises(UserError, match=r"vocabulary of 289, found \[289, 300\]"):
        check_tokenizer(toy_tokenizer(), tmp_path, 289, ())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [285, -1]}')
    tokenizer = toy_tokenizer()
    tokenizer.eos_token = None
    assert stop_ids(tokenizer, tmp_path) == {285}
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(UserError, match="eos_token_id"):
        check_tokenizer(tokenizer, tmp_path, 289, ())


def test_template_arguments_change_the_prompt_and_are_checked(tmp_path: Path) -> None:
    tokenizer, arguments = toy_tokenizer(QWEN3, eos="<|im_end|>"), {"enable_thinking": False}
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    prompt, without = (
        tokenizer.decode(prompt_ids(tokenizer, [user("q")], arguments=a)) for a in ({}, arguments)
    )
    assert without == prompt + "<think>\n\n</think>\n\n"
    assert check_tokenizer(tokenizer, tmp_path, 289, [arguments, {"enable_thinking": True}]) == []
    (warning,) = check_tokenizer(tokenizer, tmp_path, 289, [arguments, {"enable_thought": 1}])
    assert warning.endswith("the chat template does not read 'enable_thought'")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("thinking", 'an object such as {"enable_thinking": false}, or a list of them, found'),
        (5, "expected a mapping or a list, found 5"),
        ([], "at least one value"),
        ([{"enable_thinking": None}], r"0.enable_thinking: expected true or false .* found null"),
        ({"a b": 1}, "expected a text that matches"),
        ({"messages": "x"}, "found messages, which draftlab sets"),
    ],
)
def test_template_arguments_that_are_none_are_refused(value: Any, message: str) -> None:
    for section in ("target", "eval"):
        with pytest.raises(UserError, match=message) as caught:
            parse_recipe({"name": "r", section: {"template_arguments": value}})
        assert f"{section}.template_arguments" in str(caught.value)
