"""The target's own answers: requests, rounds, dropped prompts, several decoders."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.settings import RegenerateSettings
from draftlab.target_model.loading import load_target
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TargetSettings
from draftlab.text import decode
from draftlab.text.answer_rounds import AnswerGenerator, Draft
from draftlab.text.chat_template import prompt_ids
from draftlab.text.conversations import Conversation
from draftlab.text.decode import engine_decode
from tests.helpers.fake_decoder import (
    SETTINGS,
    STOP,
    FakeDecoder,
    fake_target,
    generate,
    prompts,
)
from tests.helpers.messages import assistant, read_conversations, user
from tests.helpers.monitors import RecordingMonitor
from tests.helpers.toys import CHATML_TEMPLATE, toy_tokenizer


def test_answers_are_in_prompt_order_with_alternating_temperatures(tmp_path: Path):
    monitor = RecordingMonitor()
    conversations = generate(tmp_path / "answers.jsonl", monitor=monitor)
    assert [c.id for c in conversations] == [f"p{i}" for i in range(10)]
    assert [c.temperature for c in conversations] == [0.0, 0.8] * 5
    assert read_conversations(tmp_path / "answers.jsonl") == conversations
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.json", "answers.jsonl"]
    assert monitor.last_progress[:3] == ("answers", 13, 13)
    assert "tokens/s" in monitor.last_progress[3]
    manifest = json.loads((tmp_path / "answers.json").read_text())
    assert manifest["answers"] == 13
    assert manifest["tokens"] == sum(len(a.token_ids) for c in conversations for a in c.answers)


def test_rounds_end_before_the_first_tool_result(tmp_path: Path):
    """A tool's result answers a call that the target may not have made."""
    tools = ({"type": "function", "function": {"name": "add"}},)
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [
        user("2+2?"),
        {**assistant(""), "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        assistant("4"),
        user("sure?"),
    ]
    tokenizer = toy_tokenizer("{{ tools | tojson if tools else '' }}" + CHATML_TEMPLATE)
    decoder, path = FakeDecoder(), tmp_path / "a.jsonl"
    with_tools = [Conversation("c", chat, "s", tools=tools)]
    (conversation,) = generate(path, decoder, tokenizer=tokenizer, prompts=with_tools)
    (request,) = decoder.requests
    assert request.prompt_ids == prompt_ids(tokenizer, [user("2+2?")], tools)
    assert '"name": "add"' in tokenizer.decode(request.prompt_ids)
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"]
    assert conversation.tools == tools
    assert read_conversations(path) == [conversation]


def test_requests_carry_the_settings(tmp_path: Path):
    decoder = FakeDecoder()
    settings = RegenerateSettings(temperatures=(0.7,), top_p=0.9, top_k=5, max_new_tokens=3)
    conversations = generate(tmp_path / "a.jsonl", decoder, settings=settings, seed=9)
    request = next(r for r in decoder.requests if r.id == "p0")
    ids = prompt_ids(toy_tokenizer(), [user("write 0")])
    assert request == Request("p0", ids, 3, Sampling(0.7, 5, 0.9, 9), frozenset({STOP}))
    assert {c.temperature for c in conversations} == {0.7}


def test_later_rounds_answer_the_targets_own_earlier_answers(tmp_path: Path):
    decoder, tokenizer = FakeDecoder(), toy_tokenizer()
    conversation = generate(tmp_path / "a.jsonl", decoder)[1]
    messages, (first, second) = conversation.messages, conversation.answers
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant"]
    assert "given" not in {m["content"] for m in messages}
    assert second.prompt_ids == prompt_ids(tokenizer, messages[:3])
    text = tokenizer.decode(list(first.token_ids), skip_special_tokens=True)
    assert messages[1]["content"] == text
    assert {r.id for r in decoder.requests if r.id.startswith("p1")} == {"p1", "p1/1"}


def test_prompts_without_room_are_dropped_and_counted(tmp_path: Path):
    monitor = RecordingMonitor()
    room = len(prompt_ids(toy_tokenizer(), [user("short")])) + 3
    chats = [
        [user("x" * 200)],
        [user("short")],
        [user("short"), assistant("?"), user("y" * 200)],
    ]
    short_and_long = [Conversation(str(i), chat, "s") for i, chat in enumerate(chats)]
    arguments = {"target": fake_target(room), "monitor": monitor}
    conversations = generate(tmp_path / "a.jsonl", prompts=short_and_long, **arguments)
    assert [c.id for c in conversations] == ["1", "2"]
    assert [c.temperature for c in conversations] == [0.8, 0.0]
    assert [len(c.messages) for c in conversations] == [2, 2]
    assert all(1 <= len(c.answers[0].token_ids) <= 3 for c in conversations)
    assert "dropped 1 prompt (first: 0): no room" in monitor.lines[0]
    assert "left out 1 later turn (first: 2): no room" in monitor.text
    with pytest.raises(UserError, match="no room"):
        generate(tmp_path / "b.jsonl", prompts=short_and_long[:1], **arguments)


def test_answers_that_end_at_other_tokens_are_others(tmp_path: Path):
    target = fake_target()
    generate(tmp_path / "a.jsonl", target=target)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 256}))
    target.folder = tmp_path
    with pytest.raises(UserError, match="stop_ids"):
        generate(tmp_path / "a.jsonl", target=target)


def test_several_answers_to_a_prompt_have_their_own_ids_and_temperatures(tmp_path: Path):
    settings = SETTINGS.model_copy(update={"samples": 3, "temperatures": (0.0, 0.8)})
    arguments = {"prompts": prompts(2), "monitor": (monitor := RecordingMonitor())}
    decoder = FakeDecoder()
    conversations = generate(tmp_path / "a.jsonl", decoder, settings=settings, **arguments)
    first = {one.id: one.prompt_ids for one in decoder.requests if "/" not in one.id}
    assert first["p0"] != first["p1"]
    assert [first[c.id] for c in conversations] == [first["p0"]] * 3 + [first["p1"]] * 3
    assert "warning: answers: 1 of 6 will repeat another greedy answer" in monitor.text
    assert [(c.id, c.temperature) for c in conversations] == [
        ("p0", 0.0), ("p0~1", 0.8), ("p0~2", 0.0), ("p1", 0.8), ("p1~1", 0.0), ("p1~2", 0.8)
    ]  # fmt: skip
    arguments["monitor"] = monitor = RecordingMonitor()
    two = settings.model_copy(update={"samples": 2})
    generate(tmp_path / "two.jsonl", settings=two, **arguments)
    assert "repeat" not in monitor.text
    ambiguous = [Conversation(id_, [user("write")], "test") for id_ in ("p", "p~1")]
    decoder = FakeDecoder()
    with pytest.raises(UserError, match=r"no other prompt has, found 'p~1' twice"):
        generate(tmp_path / "b.jsonl", decoder, settings=settings, prompts=ambiguous)
    assert not decoder.requests


def test_prompts_that_the_template_drops_and_answers_that_are_cut_are_reported(tmp_path: Path):
    monitor, chat = RecordingMonitor(), [{"role": "system", "content": "SYSTEM"}, user("q")]
    template = CHATML_TEMPLATE.replace("messages %}", "messages if message.role != 'system' %}")
    asked = [Conversation(str(i), chat, "s") for i in range(4)]
    arguments = {"monitor": monitor, "prompts": asked, "tokenizer": toy_tokenizer(template)}
    settings = SETTINGS.model_copy(update={"max_new_tokens": 1})
    conversations = generate(tmp_path / "a.jsonl", settings=settings, **arguments)
    cut = sum(c.answers[0].finish == "length" for c in conversations)
    assert monitor.lines[:-1] == [
        "warning: answers: 4 prompts (first: 0): the chat template leaves out the system message",
        f"warning: answers: {cut / 4:.0%} were cut at regenerate.max_new_tokens = 1 or at the "
        "target's last position, and a head does not learn from them how answers end: raise "
        "regenerate.max_new_tokens",
    ]
    arguments["tokenizer"] = toy_tokenizer("hello")
    generate(tmp_path / "b.jsonl", **arguments)
    assert "4 prompts (first: 0): the chat template leaves out the user message" in monitor.text


@pytest.mark.parametrize(
    ("loop", "left_out"),
    [
        ("in messages[:1] %}", "user"),
        ("in messages if message.role != 'assistant' %}", "assistant"),
    ],
)
def test_a_later_turn_is_answered_behind_all_turns_or_not(tmp_path: Path, loop, left_out):
    monitor = RecordingMonitor()
    tokenizer = toy_tokenizer(CHATML_TEMPLATE.replace("in messages %}", loop))
    asked = [
        Conversation(str(i), [user("q"), assistant("?"), user("UNSEEN")], "s") for i in range(8)
    ]
    answered = generate(tmp_path / "a.jsonl", prompts=asked, tokenizer=tokenizer, monitor=monitor)
    for conversation in answered:
        is_empty = left_out == "assistant" and not conversation.messages[1]["content"].strip()
        assert len(conversation.answers) == 1 + is_empty
    assert f"the chat template leaves out the {left_out} message" in monitor.text


def test_given_answers_need_no_target(tmp_path: Path):
    monitor, path = RecordingMonitor(), tmp_path / "a.jsonl"
    settings = RegenerateSettings(enabled=False)
    conversations = generate(path, target=None, decode=None, settings=settings, monitor=monitor)
    assert [c.id for c in conversations] == ["p1", "p4", "p7"]
    assert "dropped 7 " in monitor.lines[0]
    assert read_conversations(path) == conversations


def test_chunks_answered_elsewhere_are_written_in_order(tmp_path: Path):
    monitor, decoder = RecordingMonitor(), FakeDecoder()
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    generate(alone, prompts=prompts(30))
    generator = AnswerGenerator(toy_tokenizer(), SETTINGS, 1, frozenset({STOP}), 512)

    def answer_chunks(chunks: list[list[Draft]]) -> Iterator[tuple[int, list[Draft]]]:
        for number in sorted(range(len(chunks)), key=lambda number: (number % 3, -number)):
            chunk = copy.deepcopy(chunks[number])
            generator.answer(chunk, decoder, lambda _: None)
            yield number, chunk

    elsewhere = {"decode": None, "answer_chunks": answer_chunks, "monitor": monitor}
    generate(together, prompts=prompts(30), **elsewhere)
    assert together.read_bytes() == alone.read_bytes()
    assert len(decoder.requests) == 40
    assert monitor.last_progress[:3] == ("answers", 40, 40)


def test_control_tokens_in_a_users_text_are_named(tmp_path: Path) -> None:
    asked = [
        Conversation("a", [user("what is <|eot_id|> ?")], "test"),
        Conversation("b", [user("what is <b> ?")], "test"),
    ]
    monitor = RecordingMonitor()
    generate(tmp_path / "a.jsonl", prompts=asked, monitor=monitor)
    (line,) = [line for line in monitor.lines if "control token" in line]
    assert line.startswith("warning: answers: 1 prompt (first: a)")
    assert "'<|eot_id|>'" in line


def test_pieces_share_an_engine_until_one_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(TargetSettings(path="embedded", device="cpu"))
    made: list[tuple[int, int]] = []
    engines, new_engine = [], decode.answer_engine

    def counted(target: Target, batch: int, max_length: int, monitor: Monitor) -> Engine:
        gc.collect()
        assert not any(engine() for engine in engines)  # this one needs their memory
        made.append((batch, max_length))
        engine = new_engine(target, batch, max_length, monitor)
        engines.append(weakref.ref(engine))
        return engine

    def answers(decoder: decode.Decode, count: int, length: int, most: int) -> dict[str, Any]:
        prompts = [tuple(range(i + 5, i + 5 + length)) for i in range(count)]
        sampled = [Sampling(0.8 * (i % 2)) for i in range(count)]
        requests = [
            Request(f"{length} {i}", ids, 8, sampling)
            for i, (ids, sampling) in enumerate(zip(prompts, sampled, strict=True))
        ]
        return {g.id: g.token_ids for g in decoder(requests, most)}

    pieces = [(2, 5, 20), (2, 7, 20), (4, 3, 15), (2, 4, 15), (2, 7, 30), (4, 6, 20)]
    alone = [answers(engine_decode(target, 3), *piece) for piece in pieces]
    monkeypatch.setattr(decode, "answer_engine", counted)
    shared = engine_decode(target, 3)
    assert [answers(shared, *piece) for piece in pieces] == alone
    assert made == [(2, 20), (3, 20), (3, 30)]
