"""Public data sets' rows, as they lie on disk, to conversations; and what is left out, counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftlab.errors import UserError
from draftlab.text import chat_rows, data_sets
from tests.helpers.drivers import load
from tests.helpers.messages import read_conversations, user

chats = load("data_prep/chats")

ADD = {"name": "add", "description": "adds", "parameters": {"a": {"type": "int"}}}
CALL = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def turns(**roles: str) -> list[dict[str, str]]:
    """Return turns as ShareGPT has them; a number behind a role's name is left out."""
    return [{"from": role.rstrip("0123456789"), "value": text} for role, text in roles.items()]


def chat_call(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **more}


TOOL_ANSWER = {"role": "tool", "content": "4"}
CALLED = assistant("", tool_calls=CALL)
THOUGHT = assistant("2", reasoning_content="hm")

# Rows as the data sets have them, and the messages they become.
ROWS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "sharegpt": (
        {
            "id": "Q_0",
            "conversations": turns(human="“日本語”?", gpt="yes", human2="?", gpt2="y"),
        },
        [user("“日本語”?"), assistant("yes"), user("?"), assistant("y")],
    ),
    "ultrachat": (
        {"prompt": "hi", "prompt_id": "0f3", "messages": [user("hi"), assistant("hello")]},
        [user("hi"), assistant("hello")],
    ),
    "magpie": (
        {"instruction": "q", "response": "a", "conversations": turns(human="q", gpt="a")},
        [user("q"), assistant("a")],
    ),
    "perfectblend": (
        {"conversations": turns(system="be kind", human="q", gpt="a"), "source": "MetaMathQA"},
        [{"role": "system", "content": "be kind"}, user("q"), assistant("a")],
    ),
    "openthoughts": (
        {
            "system": "Think.",
            "conversations": turns(
                user="1+1?",
                assistant="<|begin_of_thought|>\n\nhm\n\n<|end_of_thought|>\n\n"
                "<|begin_of_solution|>\n\n2\n\n<|end_of_solution|>",
            ),
        },
        [{"role": "system", "content": "Think."}, user("1+1?"), THOUGHT],
    ),
    "reasoning tags": (
        {"messages": [user("1+1?"), assistant("<think>\nhm\n</think>\n\n2")]},
        [user("1+1?"), THOUGHT],
    ),
    "reasoning column": (
        {"question": "1+1?", "answer": "2", "reasoning": "hm"},
        [user("1+1?"), THOUGHT],
    ),
    "chat api tools": (
        {
            "messages": [
                user("2+2?"),
                chat_call(
                    refusal=None,
                    tool_calls=[{"id": "c1", "function": {"name": "add", "arguments": '{"a": 2}'}}],
                ),
                TOOL_ANSWER | {"tool_call_id": "c1"},
                assistant("4", tool_calls=[]),
            ],
            "tools": [{"type": "function", "function": ADD}],
        },
        [
            user("2+2?"),
            assistant("", tool_calls=[CALL[0] | {"id": "c1"}]),
            TOOL_ANSWER | {"tool_call_id": "c1"},
            assistant("4"),
        ],
    ),
    "toolcalls": (
        {
            "query": "2+2?",
            "answers": '[{"name": "add", "arguments": {"a": 2}}]',
            "tools": json.dumps([ADD]),
        },
        [user("2+2?"), CALLED],
    ),
    "sharegpt tools": (
        {
            "conversations": turns(
                human="2+2?",
                function_call='{"name": "add", "arguments": {"a": 2}}',
                observation="4",
                gpt="4",
            ),
            "tools": json.dumps([ADD]),
        },
        [user("2+2?"), CALLED, TOOL_ANSWER, assistant("4")],
    ),
    "first chat api's functions": (
        {
            "messages": [
                {**user("2+2?"), "function_call": None},
                chat_call(function_call={"name": "add", "arguments": '{"a": 2}'}),
                {"role": "function", "name": "add", "content": "4", "function_call": None},
                {**assistant("4"), "function_call": {"name": None, "arguments": None}},
            ],
            "functions": [ADD],
        },
        [user("2+2?"), CALLED, TOOL_ANSWER | {"name": "add"}, assistant("4")],
    ),
    "sharegpt tools, several at once": (
        {
            "conversations": turns(
                human="2+2, twice?",
                function_call=json.dumps([{"name": "add", "arguments": {"a": 2}}] * 2),
                observation="[4, 4]",
            ),
        },
        [
            user("2+2, twice?"),
            assistant("", tool_calls=CALL * 2),
            {"role": "tool", "content": "[4, 4]"},
        ],
    ),
    "squad": (
        {
            "id": "57",
            "title": "Oak",
            "context": "An oak is a tree.",
            "question": "What is an oak?",
            "answers": {"text": ["a tree", "tree"], "answer_start": [10, 12]},
        },
        [user("An oak is a tree.\n\nWhat is an oak?"), assistant("a tree")],
    ),
    "contexts": (
        {"question": "Which?", "answer": ["the first", "one"], "context": ["One.", "", "Two."]},
        [user("One.\n\nTwo.\n\nWhich?"), assistant("the first")],
    ),
    "dolly": (
        {"instruction": "Which?", "context": "", "response": "this", "category": "open_qa"},
        [user("Which?"), assistant("this")],
    ),
    "dolly with context": (
        {"instruction": "Sum up.", "context": "Long.", "response": "Short.", "category": "summary"},
        [user("Long.\n\nSum up."), assistant("Short.")],
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]},
        [user("q")],
    ),
    "pair with input": (
        {"instruction": "say it in French", "input": "good day", "output": "bonjour"},
        [user("say it in French\n\ngood day"), assistant("bonjour")],
    ),
    "a prompt and its completion": (
        {"prompt": "hi", "completion": "hello"},
        [user("hi"), assistant("hello")],
    ),
    "a developer's message": (
        {"messages": [{"role": "developer", "content": "be short"}, user("hi")]},
        [{"role": "system", "content": "be short"}, user("hi")],
    ),
    "a prompt alone": ({"prompt": "hi", "id": 3}, [user("hi")]),
    "a prompt of messages": ({"prompt": [user("hi")]}, [user("hi")]),
    "an instruction alone": (
        {"instruction": "add", "input": "2 + 2", "output": ""},
        [user("add\n\n2 + 2")],
    ),
    "questions of several turns": (
        {"question_id": 81, "turns": ["a?", "b?"]},
        [user("a?"), assistant(""), user("b?")],
    ),
    "an instance": (
        {"id": "s0", "instruction": "add", "instances": [{"input": "2 + 2", "output": "4"}]},
        [user("add\n\n2 + 2"), assistant("4")],
    ),
    "reasoning by its new name": (
        {"messages": [user("hi"), assistant("2", reasoning="hm")]},
        [user("hi"), THOUGHT],
    ),
}


@pytest.mark.parametrize("shape", ROWS)
def test_each_shape(shape: str, tmp_path: Path) -> None:
    row, expected = ROWS[shape]
    messages, tools = chat_rows.read_row(row)
    assert messages == expected
    has_tools = "tools" in row or "functions" in row
    assert tools == ([{"type": "function", "function": ADD}] if has_tools else [])
    # What is written is what the package reads.
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    chats.prepare([chats.parse_source(str(tmp_path / "rows.jsonl"))], tmp_path / "o", say=print)
    (read,) = read_conversations(tmp_path / "o")
    assert read.messages == expected
    assert list(read.tools) == tools
    assert read.source == "rows.jsonl"


BAD: list[tuple[Any, str]] = [
    ("text", "not a record"),
    ({"text": "free"}, "no column of turns"),
    ({"messages": []}, "no column of turns"),
    ({"messages": "[{"}, "turns that are no JSON"),
    ({"messages": [user("q"), {"role": "judge", "content": "x"}]}, "an unknown role, 'judge'"),
    ({"messages": [user("q"), assistant(" \n")]}, "an empty answer"),
    ({"messages": [user(""), assistant("a")]}, "an empty question"),
    ({"messages": [assistant("a"), user("q")]}, "begins with an answer"),
    ({"messages": [{"role": "system", "content": "s"}]}, "no user turn"),
    ({"messages": [user("q"), {"role": "assistant", "content": 7}]}, "a turn that is no text"),
    ({"messages": [user("q"), {"role": "assistant", "content": None}]}, "no text"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "images"),
    ({"image": "a.jpg", "question": "q", "answer": "a"}, "images, audio or video"),
    ({"messages": [{"role": "user", "content": ["q", {"type": "text", "text": "r"}]}]}, "no text"),
    ({"messages": [user("q\ud83d"), assistant("a")]}, "surrogate"),
    ({"messages": [user("q")], "tools": [{"name": b"f"}]}, "JSON cannot hold"),
    ({"messages": [user("q"), assistant("", tool_calls=[{"function": {}}])]}, "no function"),
    ({"query": "q", "answers": '[{"name": "f", "arguments": "{"}]'}, "arguments of a call"),
    ({"messages": [user("q")], "tools": [3]}, "a tool that is no schema"),
    ({"question": "q", "answer": "a", "context": {"title": ["t"]}}, "a context that is no text"),
    ({"question": "q", "answers": {"text": []}, "context": "t"}, "a question without an answer"),
    ({"question": "q", "answers": {"spans": ["a"]}}, "a turn that is no text"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_what_is_dropped_says_why(row: Any, reason: str) -> None:
    with pytest.raises(chat_rows.Dropped, match=reason):
        chat_rows.read_row(row)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_mixed_schemas_duplicates_quotas_and_counts(tmp_path: Path) -> None:
    rows = [row for row, _ in ROWS.values()] + [row for row, _ in BAD[:5]]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "one.jsonl").write_text(text)
    (tmp_path / "two.jsonl").write_text(text + "{broken\n\n")
    printed: list[str] = []
    out = tmp_path / "all.jsonl"
    sources = [f"{tmp_path / 'one.jsonl'}:5", str(tmp_path / "two.jsonl")]
    counts = chats.prepare([chats.parse_source(s) for s in sources], out, say=printed.append)
    assert counts == json.loads((tmp_path / "all.counts.json").read_text())
    one, two = counts["one.jsonl"], counts["two.jsonl"]
    # "q" and "1+1?" come again; a quota stops the reading.
    assert (one["rows"], one["kept"], one["a question that was there before"]) == (8, 5, 3)
    assert two["rows"] == len(rows) + 2
    assert two["not a record of columns"] == 1
    assert (two["a line that is no JSON"], two["an empty line"]) == (1, 1)
    assert two["an unknown role, 'judge'"] == 1
    assert any("dropped 1: not a record" in line for line in printed)
    for count in counts.values():
        reasons = {k: v for k, v in count.items() if k not in ("rows", "kept")}
        assert count["rows"] == count["kept"] + sum(reasons.values())
    questions = [
        next(m["content"] for m in x["messages"] if m["role"] == "user") for x in lines(out)
    ]
    assert len(questions) == len(set(questions)) == one["kept"] + two["kept"]
    assert len(read_conversations(out)) == len(questions)
    with pytest.raises(UserError, match="twice"):
        chats.prepare([chats.parse_source("magpie")] * 2, out, say=print)


def test_damaged_parquet_is_named(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and nothing of it")
    source = chats.parse_source(str(tmp_path / "rows.parquet"))
    with pytest.raises(UserError, match="expected rows of split 'train', found: ") as caught:
        chats.prepare([source], tmp_path / "o.jsonl", say=print)
    assert caught.value.where == str(tmp_path / "rows.parquet")


def test_a_source_is_never_replaced(tmp_path: Path) -> None:
    text = json.dumps([ROWS["magpie"][0], {"text": "what is dropped"}])
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(row) for row in json.loads(text)))
    (tmp_path / "log.counts.json").write_text(text)
    (tmp_path / "link.jsonl").symlink_to("log.jsonl")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for source, out in (
        ("log.jsonl", "log.jsonl"),
        ("link.jsonl", "log.jsonl"),
        ("log.counts.json", "log.jsonl"),
    ):
        sources = [chats.parse_source(str(tmp_path / source))]
        with pytest.raises(UserError, match="found a source"):
            chats.prepare(sources, tmp_path / out, say=print)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    out.write_text("old")
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="none that could be kept"):
        chats.prepare([chats.parse_source(str(tmp_path / "bad.jsonl"))], out, say=print)
    assert out.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.jsonl", "o.jsonl"]


def test_a_json_file_that_is_no_list_is_refused(tmp_path: Path) -> None:
    for text, kind in (("3", "an? int"), ('{"a": [1]}', "a dict"), ("{}\n{}", "other text: Extra")):
        (tmp_path / "a.json").write_text(text)
        source = chats.parse_source(str(tmp_path / "a.json"))
        with pytest.raises(UserError, match=f"in JSON, found {kind}") as caught:
            chats.prepare([source], tmp_path / "o.jsonl", say=print)
        assert ".jsonl" in caught.value.do


def test_sources_by_name_hub_id_and_file(tmp_path: Path) -> None:
    assert chats.parse_source("magpie:30").quota == 30
    assert chats.parse_source("ultrachat").split == "train_sft"
    source = chats.parse_source("org/set/main@test:5")
    assert source == data_sets.Source("org/set", "org/set", "test", "main", quota=5)
    for text in ("nothing", "a/b/c/d", str(tmp_path / "none.jsonl")):
        with pytest.raises(UserError, match="expected a data set"):
            chats.parse_source(text)
    with pytest.raises(UserError, match="a quota of 1 or more, found 0"):
        chats.parse_source("magpie:0")


def test_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(ROWS["magpie"][0]) + "\n")
    command = [sys.executable, chats.__file__, "a.jsonl", "--out", "o.jsonl"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "a.jsonl: 1 of 1 rows kept\n", done.stderr
