"""Answers as messages: what later turns of a conversation are rendered behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.text.answer_rounds import AnswerParser
from draftlab.text.chat_template import RenderError, prompt_ids
from draftlab.text.conversations import Conversation
from tests.helpers.assistant_turns import assistant_turns
from tests.helpers.fake_decoder import generate
from tests.helpers.messages import assistant, user
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.template_families import FAMILIES
from tests.helpers.toys import toy_tokenizer
from tests.text.test_public_templates import (
    AGAIN,
    ASK,
    CALL,
    FOUR,
    THINK,
    THINK_CALL,
    TOOLS,
    tokenizer_for,
)

HARMONY_ANSWER = (
    "<|channel|>analysis<|message|>easy sum<|end|><|start|>assistant"
    "<|channel|>final<|message|>four<|return|>"
)
ANSWERS = {
    # Families whose templates do not write an answer as the target does.
    "deepseek-r1": "easy sum\n</think>\n\nfour<｜end▁of▁sentence｜>",
    "deepseek-v3.1": "four<｜end▁of▁sentence｜>",
    "qwq": "easy sum\n</think>\n\nfour<|im_end|>",
    "gemma4": "<|channel>thought\neasy sum\n<channel|>four<turn|>",
}


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"glm4.5", "idefics3", "kimi-k3"}))
def test_the_next_prompt_is_what_a_server_renders_from_the_parsed_answer(family) -> None:
    tokenizer = tokenizer_for(family)
    reasons = family in ("qwen3", "gpt-oss", "deepseek-r1", "qwq", "gemma4")
    message = THINK if reasons else FOUR
    if family in ANSWERS:
        prompt = prompt_ids(tokenizer, [ASK])
        answer = tuple(tokenizer(ANSWERS[family], add_special_tokens=False)["input_ids"])
    else:
        (turn,) = assistant_turns(tokenizer, [ASK, message])
        prompt, answer = turn.prompt_ids, turn.token_ids
    parsed = AnswerParser(tokenizer).parse(prompt, answer, stopped=True)
    assert {**parsed, "content": parsed["content"].strip()} == message
    served = tokenizer.apply_chat_template(
        [ASK, {**message, "thinking": message.get("reasoning_content")}, AGAIN],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(prompt_ids(tokenizer, [ASK, parsed, AGAIN])) == list(served)


@pytest.mark.parametrize(
    ("family", "answer", "stopped", "message"),
    [
        ("qwen3", "<think>\neasy sum", False, assistant("", reasoning_content="easy sum")),
        ("qwen3", "<think>\n\n</think>\n\nfour<|im_end|>", True, FOUR),
        ("deepseek-r1", "easy sum", False, assistant("", reasoning_content="easy sum")),
        ("gemma4", "<|channel>thought\neasy", False, assistant("", reasoning_content="easy")),
        ("gpt-oss", HARMONY_ANSWER, True, THINK),
        (
            "gpt-oss",
            HARMONY_ANSWER.partition("<|start|>")[0],
            False,
            assistant("", reasoning_content="easy sum"),
        ),
        ("gpt-oss", "<|channel|>final<|message|>four", False, FOUR),
        ("llama3", "", False, assistant("")),
    ],
)
def test_reasoning_and_cut_answers(family, answer, stopped, message) -> None:
    tokenizer = tokenizer_for(family)
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    prompt = prompt_ids(tokenizer, [ASK])
    assert AnswerParser(tokenizer).parse(prompt, ids, stopped=stopped) == message


def test_a_stop_token_need_not_be_special() -> None:
    tokenizer = toy_tokenizer()
    text = tokenizer("four yes", add_special_tokens=False)["input_ids"]
    assert text[-1] not in tokenizer.all_special_ids
    message = AnswerParser(tokenizer).parse((), text, stopped=True)
    assert message["content"].strip() == tokenizer.decode(text[:-1]).strip() != ""


def test_an_answer_is_parsed_without_listing_the_added_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tokenizer such as Gemma's has 6,400 of them: listing them took 44 ms an answer."""
    tokenizer = tokenizer_for("qwen3")
    parser = AnswerParser(tokenizer)
    ids = tokenizer("<think>\neasy</think>\n\nfour<|im_end|>", add_special_tokens=False)[
        "input_ids"
    ]
    for name in ("added_tokens_decoder", "added_tokens_encoder", "all_special_ids"):
        monkeypatch.setattr(type(tokenizer), name, property(lambda _: pytest.fail("lists tokens")))
    message = parser.parse((), ids, stopped=True)
    assert message == assistant("four", reasoning_content="easy")


def test_no_turn_follows_an_answer_that_was_cut_in_its_reasoning(tmp_path: Path) -> None:
    tokenizer = tokenizer_for("qwen3")
    cut = tuple(tokenizer("<think>\neasy", add_special_tokens=False)["input_ids"])

    def decode(requests: Sequence[Request], _: int) -> Iterator[Generation]:
        for request in requests:
            yield Generation(request.id, cut, "length", Counters(0), (), (), 0.0, 0.0)

    monitor = RecordingMonitor()
    (conversation,) = generate(
        tmp_path / "a.jsonl",
        decode,
        tokenizer=tokenizer,
        prompts=[Conversation("c", [ASK, FOUR, AGAIN], "s")],
        monitor=monitor,
    )
    assert len(conversation.answers) == 1
    assert "left out 1 later turn" in monitor.text
    assert "cut in its reasoning" in monitor.text


@pytest.mark.parametrize(
    ("family", "chat", "control"),
    [
        ("gpt-oss", [ASK, THINK_CALL], "assistant to=functions.add"),
        ("qwen3", [ASK, THINK_CALL], "<tool_call>"),
        ("mistral", [ASK, CALL], "[TOOL_CALLS]"),
        ("llama4", [ASK, CALL], "<|python_start|>"),
        ("gpt-oss", "<|channel|>commentary<|message|>four<|return|>", "<|channel|>commentary"),
        ("gpt-oss", "<|message|>four<|return|>", "<|message|>four"),
        ("llama3", "four<|start_header_id|>four<|eot_id|>", "<|start_header_id|>"),
    ],
)
def test_tool_calls_and_other_control_tokens_are_refused(family, chat, control) -> None:
    tokenizer = tokenizer_for(family)
    if isinstance(chat, str):
        ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    else:
        ids = assistant_turns(tokenizer, chat, TOOLS)[-1].token_ids
    with pytest.raises(RenderError) as caught:
        AnswerParser(tokenizer).parse(prompt_ids(tokenizer, [ASK]), ids, stopped=True)
    assert control in caught.value.what


def test_later_turns_of_gpt_oss_follow_the_final_channel_alone(tmp_path: Path) -> None:
    tokenizer, monitor = tokenizer_for("gpt-oss"), RecordingMonitor()
    calls = "<|channel|>commentary to=functions.add<|message|>four<|call|>"
    written = {"a": HARMONY_ANSWER, "a/1": HARMONY_ANSWER, "b": calls}
    answers = {
        id_: tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        for id_, text in written.items()
    }

    def decode(requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        for request in requests:
            ids = answers[request.id]
            yield Generation(request.id, ids, "stop", Counters(0), (), (), 0.0, 0.0)

    chat = [ASK, assistant("given"), AGAIN]
    asked = [Conversation("a", chat, "s"), Conversation("b", chat, "s")]
    arguments = {"tokenizer": tokenizer, "prompts": asked, "decode": decode, "monitor": monitor}
    first, second = generate(tmp_path / "a.jsonl", **arguments)
    assert [answer.token_ids for answer in first.answers] == [answers["a"], answers["a/1"]]
    text = tokenizer.decode(list(first.answers[1].prompt_ids))
    assert text.endswith(
        "<|start|>user<|message|>two and two<|end|><|start|>assistant<|channel|>final<|message|>"
        "four<|end|><|start|>user<|message|>sure<|end|><|start|>assistant"
    )
    assert first.messages == [user("two and two"), THINK, user("sure"), THINK]
    assert [answer.token_ids for answer in second.answers] == [answers["b"]]
    assert second.messages == [ASK, assistant(calls)]
    assert "left out 1 later turn (first: b): expected an answer of text and" in monitor.text
