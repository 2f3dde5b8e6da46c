"""A row of a public chat data set as a conversation of draftlab's, or the reason why not.

The sets differ in the names of their columns and roles, not in what they hold, so one reading does
for all: ShareGPT, Magpie and Open-PerfectBlend (`conversations` of `from`, `value`), UltraChat and
the chat APIs (`messages` of `role`, `content`), pairs (`instruction`, `response` and the like),
reasoning traces (tags in the text, or a column of their own), and calls of tools (in the chat
APIs' form, as `function_call` and `observation` turns, or as `query`, `answers`, `tools`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function_call": "call",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
TURNS = ("messages", "conversations", "conversation")
PAIRS = (
    ("instruction", "response"),
    ("instruction", "output"),
    ("problem", "generation"),
    ("problem", "solution"),
    ("question", "answer"),
    ("prompt", "response"),
    ("query", "answers"),
)
_THOUGHT = re.compile(
    r"^\s*(?:<think>|<\|begin_of_thought\|>)(.*?)(?:</think>|<\|end_of_thought\|>)", re.DOTALL
)
_SOLUTION = re.compile(r"<\|(?:begin|end)_of_solution\|>")


class Dropped(Exception):
    """Why a row is no conversation; few different texts, since they are counted."""


@dataclass(frozen=True)
class Chat:
    """Messages and tools in the schema of `draftlab/data/line_schema.py`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


def read_row(row: Any) -> Chat:
    """A row of any of the shapes above.

    Raises:
        Dropped: with the reason.
    """
    if not isinstance(row, Mapping):
        raise Dropped("not a record of columns")
    turns = next((row[name] for name in TURNS if row.get(name)), None)
    messages = _of_pair(row) if turns is None else _of_turns(_listed(turns, "turns"))
    system = row.get("system")
    if system and isinstance(system, str) and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = [_tool(tool) for tool in _listed(row.get("tools") or [], "tools")]
    _check(messages, tools)
    return Chat(messages, tools)


def _listed(value: Any, what: str) -> Sequence[Any]:
    """A list, which may be written as JSON."""
    if isinstance(value, str):
        value = _json(value, what)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise Dropped(f"{what} that are no list")
    return value


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Dropped(f"{what} that are no JSON") from None


def _of_pair(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    for asked, answered in PAIRS:
        if isinstance(row.get(asked), str) and row.get(answered) is not None:
            break
    else:
        raise Dropped("no column of turns")
    given = row.get("input") if asked == "instruction" else None  # what Alpaca's are about
    question = f"{row[asked]}\n\n{given}" if given and isinstance(given, str) else row[asked]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if answered == "answers":
        calls = _calls(_listed(row[answered], "calls of tools"))
        return [*messages, {"role": "assistant", "content": "", "tool_calls": calls}]
    answer = _answer(_text(row[answered]))
    thoughts = row.get("reasoning") or row.get("reasoning_content")
    if isinstance(thoughts, str) and "reasoning_content" not in answer:
        answer["reasoning_content"] = thoughts
    return [*messages, answer]


def _of_turns(turns: Sequence[Any]) -> list[dict[str, Any]]:
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise Dropped("a turn that is no record")
        name = turn.get("role", turn.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            raise Dropped(f"an unknown role, {str(name)[:20]!r}")
        text = _text(
            turn.get("content", turn.get("value")), may_be_none=bool(turn.get("tool_calls"))
        )
        if role == "call":
            calls = _calls([_json(text, "calls of tools")])
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            continue
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant":
            message = _answer(text)
            thoughts = turn.get("reasoning_content") or turn.get("thinking")
            if isinstance(thoughts, str):
                message["reasoning_content"] = thoughts
            if turn.get("tool_calls"):
                message["tool_calls"] = _calls(_listed(turn["tool_calls"], "calls of tools"))
        elif role == "tool":
            message |= {
                k: turn[k] for k in ("name", "tool_call_id") if isinstance(turn.get(k), str)
            }
        messages.append(message)
    return messages


def _text(value: Any, *, may_be_none: bool = False) -> str:
    if value is None and may_be_none:
        return ""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        texts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
            for part in value
        ]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise Dropped("a turn with images or other parts that are no text")
        value = "".join(texts)
    if not isinstance(value, str):
        raise Dropped("a turn that is no text")
    return value


def _answer(text: str) -> dict[str, Any]:
    """An assistant's message, its reasoning taken out of the text's tags."""
    found = _THOUGHT.match(text)
    rest = _SOLUTION.sub("", text[found.end() :] if found else text)
    answer = {"role": "assistant", "content": rest.strip() if found else rest}
    return {**answer, "reasoning_content": found[1].strip()} if found else answer


def _calls(calls: Sequence[Any]) -> list[dict[str, Any]]:
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise Dropped("a call of no function")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = _json(arguments, "arguments of a call")
        if not isinstance(arguments, Mapping):
            raise Dropped("arguments of a call without names")
        # Columns of Parquet have every name that any row has.
        given = {name: value for name, value in arguments.items() if value is not None}
        found.append(
            {"type": "function", "function": {"name": function["name"], "arguments": given}}
        )
    return found


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise Dropped("a tool that is no schema")
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _check(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    spoken = [message["role"] for message in messages if message["role"] != "system"]
    if "user" not in spoken:
        raise Dropped("no user turn")
    if spoken[0] != "user":
        raise Dropped("begins with an answer")
    for message in messages:
        said = message["content"].strip() or message.get("tool_calls")
        if not said and message["role"] in ("user", "assistant"):
            raise Dropped(f"an empty {'answer' if message['role'] == 'assistant' else 'question'}")
    try:
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Dropped("half a surrogate pair") from None
    except (TypeError, ValueError):
        raise Dropped("values that JSON cannot hold") from None
