"""Conversations and prompts: what is read, refused and dropped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftlab.errors import UserError
from draftlab.formatting import count_text
from draftlab.progress import Monitor
from draftlab.text.conversations import (
    Answer,
    Conversation,
    write_conversations,
)
from draftlab.text.prompts import load_prompts, select_answered
from draftlab.text.settings import PromptSettings
from tests.helpers.messages import assistant, read_conversations, user
from tests.helpers.monitors import RecordingMonitor


def line(**changes) -> dict:
    """Return a valid line with changes; a value of None removes the key."""
    valid = {"id": "a", "messages": [user("hi")], "source": "s"}
    return {key: value for key, value in {**valid, **changes}.items() if value is not None}


def write(path: Path, *lines: dict | str | bytes) -> Path:
    encoded = [json.dumps(value) if isinstance(value, dict) else value for value in lines]
    encoded = [value.encode() if isinstance(value, str) else value for value in encoded]
    path.write_bytes(b"".join(value + b"\n" for value in encoded))
    return path


def load(path: Path, monitor: Monitor | None = None, **changes) -> list[Conversation]:
    return load_prompts(PromptSettings(source=str(path), **changes), monitor or Monitor())


def test_written_conversations_are_read_back(tmp_path: Path):
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"a": [1]}}}
    chat = [user("a\u2028b\n日本"), assistant("")]
    with_tools = [
        user("q"),
        {**assistant(""), "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1", "name": "f"},
        assistant("a"),
    ]
    # Some conversations of one file may have tools and others none.
    conversations = [
        Conversation("x", chat, "s", 0.8, (Answer((1, 2), (3,), "stop"),)),
        Conversation("y", chat[:1], "s"),
        Conversation("z", with_tools, "s", tools=({"type": "function", "function": {}},)),
    ]
    write_conversations(tmp_path / "c.jsonl", conversations)
    assert read_conversations(tmp_path / "c.jsonl") == conversations


def test_ids_and_sources_may_be_left_out(tmp_path: Path):
    none = line(id=None, source=None)
    path = write(tmp_path / "mine.jsonl", none, line(id="b", source="x", temperature=0.5), none)
    origins = [(c.id, c.source) for c in read_conversations(path)]
    assert origins == [("mine:1", "mine.jsonl"), ("b", "x"), ("mine:3", "mine.jsonl")]


def turn(role: str = "user", content: object = "q", **fields) -> dict:
    """Return a line whose only message has these fields."""
    return line(id="b", messages=[{"role": role, "content": content, **fields}])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("{not json", "JSON object"),
        ("", "JSON object"),
        (b'{"id": "\xff"}', "UTF-8"),
        ("[1, 2]", "the line: expected a mapping, found [1, 2]"),
        (line(id="b", messages=[{"role": "user"}]), "messages.0.content"),
        (turn(content="\ud800"), "surrogate"),
        (line(id="b", tools=[{"name": "\ud800"}]), "surrogate"),
        ("[" * 100_000, "JSON object"),
        ('{"id": ' + "1" * 5000 + "}", "JSON object"),
        (turn(reasoning_content="hm"), "only an assistant has"),
        (turn("assistant", "", tool_calls=[{"function": {"name": "f"}}]), "function.arguments"),
        (line(id="b", messages=[]), "messages"),
        (line(id="b", sorce="x"), "sorce"),
        (line(id=True), "id: expected a text, found true"),
        (turn(content=5), "messages.0.content: expected a text or a list, found 5"),
        (turn(content=[{"type": "text"}]), "content.0: a part of type text needs a text"),
        (turn(content=[{"type": ""}]), "content.0.type: expected a text that is not empty, found"),
        (turn(colour=1), "messages.0.colour: unknown key"),
        (turn("human"), "found 'human'"),
        (line(), "here and on line 1"),
    ],
)
def test_a_bad_line_is_an_error_with_file_and_line(tmp_path: Path, bad, words):
    path = write(tmp_path / "c.jsonl", line(), bad, line(id="z"))
    with pytest.raises(UserError) as caught:
        read_conversations(path)
    assert words in caught.value.what
    assert caught.value.where == f"{path}:2"


def test_ids_may_be_integers(tmp_path: Path):
    path = write(tmp_path / "c.jsonl", line(id=0), line(id=-7), line(id="x"))
    assert [c.id for c in read_conversations(path)] == ["0", "-7", "x"]
    write(path, line(id=7), line(id="7"))
    with pytest.raises(UserError, match="expected unique ids, found '7' here and on line 1"):
        read_conversations(path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path):
    path = write(tmp_path / "windows.jsonl", b"\xef\xbb\xbf" + json.dumps(line()).encode() + b"\r")
    assert len(read_conversations(path)) == 1


def test_empty_and_missing_files_are_errors(tmp_path: Path):
    (tmp_path / "empty.jsonl").touch()
    for name in ("empty.jsonl", "missing.jsonl", "."):
        with pytest.raises(UserError) as caught:
            load(tmp_path / name)
        assert str(tmp_path) in caught.value.where


def test_conversations_without_a_question_are_dropped_and_counted(tmp_path: Path):
    path, monitor = tmp_path / "c.jsonl", RecordingMonitor()
    write(
        path,
        line(id="1", messages=[{"role": "system", "content": "x"}]),
        line(id="2", messages=[assistant("x"), user("x")]),
        *(line(id=str(number)) for number in (3, 4, 5)),
    )
    prompts = load(path, monitor, max_prompts=2, deduplicate=False)
    assert [c.id for c in prompts] == ["3", "4"]
    assert monitor.text.count("dropped 1 conversation") == 2
    write(path, line(messages=[assistant("x")]))
    with pytest.raises(UserError, match="user turn"):
        load(path)


def test_embedded_prompts_load_and_are_disjoint():
    texts, monitor = {}, RecordingMonitor()
    for source in ("embedded", "embedded:heldout"):
        prompts = load_prompts(PromptSettings(source=source), monitor)
        assert len(prompts) >= 128
        assert f"{len(prompts):,}" in monitor.lines[-1]
        texts[source] = {c.messages[-1]["content"] for c in prompts}
    assert not texts["embedded"] & texts["embedded:heldout"]


def test_without_regeneration_answers_are_required():
    unanswered = Conversation("a", [user("x")], "s")
    answered = Conversation("b", [user("x"), assistant("y")], "s")
    monitor = RecordingMonitor()
    assert select_answered([unanswered, answered], monitor) == [answered]
    assert "dropped 1 " in monitor.lines[0]
    with pytest.raises(UserError, match="assistant turn"):
        select_answered([unanswered], monitor)


def parts(*kinds: str) -> dict:
    """Return a user turn of several parts, as chat APIs write it."""
    content = [
        {"type": kind, "text": f"part {i}. "} if kind == "text" else {"type": kind, kind: {"a": 1}}
        for i, kind in enumerate(kinds)
    ]
    return {"role": "user", "content": content}


def test_conversations_with_images_are_dropped_and_counted(tmp_path: Path):
    path, monitor = tmp_path / "chat.jsonl", RecordingMonitor()
    write(
        path,
        line(id="text", messages=[parts("text", "text")]),
        line(id="image", messages=[parts("text", "image_url")]),
        line(id="answered", messages=[parts("image"), assistant("a cat")]),
        line(id="audio", messages=[parts("input_audio", "image")]),
        line(id="plain"),
    )
    prompts = load(path, monitor)
    assert [c.id for c in prompts] == ["text", "plain"]
    assert prompts[0].messages == [user("part 0. part 1. ")]
    for words in (
        "dropped 1 conversation with image and input_audio parts",
        "dropped 2 conversations with image parts",
        "prompts: 2 conversations from",
    ):
        assert words in monitor.text
    write(path, line(messages=[parts("image")]))
    with pytest.raises(UserError, match="expected text conversations"):
        load(path)


@pytest.mark.parametrize(
    ("changes", "selected", "repeated"),
    [
        ({}, [1, 3, 4, 5, 7], 2),
        ({"deduplicate": False}, [1, 2, 3, 4, 5, 6, 7], 0),
        ({"max_prompts": 2}, [1, 3], 1),
    ],
)
def test_conversations_that_repeat_an_earlier_one_are_dropped(
    tmp_path: Path, changes, selected, repeated
):
    lines = [
        ("a", [user("one")]),
        ("b", [user("one")]),  # a duplicate, although from another source
        ("a", [user("one"), assistant("1")]),
        ("b", [user("two")]),
        ("a", [user("three")]),
        ("a", [user("one")]),
        ("b", [user("four")]),
    ]
    path = write(tmp_path / "p.jsonl", *({"messages": m, "source": s} for s, m in lines))
    monitor = RecordingMonitor()
    assert [c.id for c in load(path, monitor, **changes)] == [f"p:{n}" for n in selected]
    assert monitor.text.count("dropped") == bool(repeated)
    if repeated:
        line = f"dropped {count_text(repeated, 'conversation')} equal to an earlier one"
        assert line in monitor.text


def test_conversations_that_differ_in_given_answers_ask_the_same(tmp_path: Path):
    """Their answers would be equal, and validation would hold out a prompt that is trained on."""
    chats = [
        [user("one")],
        [user("one"), assistant("1")],
        [user("one"), assistant("2")],
        [user("one"), assistant("1"), user("two")],
        [user("one"), assistant("2"), user("two"), assistant("3")],
        [user("one"), user("two")],
    ]
    path = write(tmp_path / "p.jsonl", *({"messages": messages} for messages in chats))
    settings = PromptSettings(source=str(path))
    asked = load_prompts(settings, Monitor(), reads_answers=False)
    assert [c.id for c in asked] == ["p:1", "p:4", "p:6"]
    assert len(load_prompts(settings, Monitor(), reads_answers=True)) == len(chats)


def test_rows_with_a_column_of_images_are_dropped_and_counted(tmp_path: Path) -> None:
    """Their text alone asks about an image that the target would not see."""
    rows = [
        {"image": "a.jpg", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"}]},
        {"images": ["a.jpg", "b.jpg"], "question": "What is it?", "answer": "Two buses."},
        {"audio": "a.wav", "video": "a.mp4", "prompt": "What is said?"},
        {"image": None, "images": [], "prompt": "hi"},  # a text among them
    ]
    monitor = RecordingMonitor()
    (prompt,) = load(write(tmp_path / "p.jsonl", *rows), monitor)
    assert prompt.messages == [user("hi")]
    assert "dropped 2 conversations with image parts" in monitor.text
    assert "dropped 1 conversation with audio and video parts" in monitor.text


def test_a_row_that_is_no_conversation_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"image": "x.png"})
    with pytest.raises(UserError, match="found no column of turns") as caught:
        read_conversations(path)
    assert "ShareGPT" in caught.value.do
