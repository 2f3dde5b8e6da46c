"""A row of a public chat data set as a conversation of draftlab's, or the reason why not.

The sets differ in the names of their columns and roles, not in what they hold, so one reading does
for all: ShareGPT, Magpie and Open-PerfectBlend (`conversations` of `from`, `value`), UltraChat and
the chat APIs (`messages` of `role`, `content`), pairs (`instruction`, `response` and the like),
reasoning traces (tags in the text, or a column of their own), and calls of tools (in the chat
APIs' form, of today or with `function_call` and `functions`; as `function_call` and `observation`
turns; or as `query`, `answers`, `tools`). Rows of prompts alone, for the target to answer, have one
of the columns of questions, `turns` (texts, as MT-Bench), or `instances` (Self-Instruct).

What a pair's question is about stands in its prompt, apart from it by an empty line: a `context`
(SQuAD, Dolly; several texts in order) before the question, Alpaca's `input` behind its instruction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
    ("question", "answers"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("query", "answers"),
)
PROMPTS = tuple(dict.fromkeys(asked for asked, _ in PAIRS))
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
"""Columns of what a row's text is about, as LLaVA's and VQA's rows have them."""
_THOUGHT = re.compile(
    r"^\s*(?:<think>|<\|begin_of_thought\|>)(.*?)(?:</think>|<\|end_of_thought\|>)", re.DOTALL
)
_SOLUTION = re.compile(r"<\|(?:begin|end)_of_solution\|>")


class Dropped(Exception):
    """The reason why a row is no conversation; reasons are counted, so texts are few."""


def read_row(row: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Convert a row of any of the shapes above to messages and tools (`conversations.py`).

    Raises:
        Dropped: with the reason.
    """
    if not isinstance(row, Mapping):
        raise Dropped("not a record of columns")
    if _media(row):
        raise Dropped("images, audio or video beside the text")
    turns = next((row[name] for name in TURNS if row.get(name)), None)
    messages = _of_columns(row) if turns is None else _of_turns(_listed(turns, "turns"))
    answered = turns is not None or "turns" not in row
    system = row.get("system")
    if system and isinstance(system, str) and messages[:1] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = [
        _tool(tool) for tool in _listed(row.get("tools") or row.get("functions") or [], "tools")
    ]
    _check(messages, tools, answered=answered)
    return messages, tools


def as_line(row: Any) -> dict[str, Any]:
    """Convert a row of another form to the fields of a line of conversations; raise a `Dropped` if
    the row is no conversation.

    A line with `messages` stays as strict as it is: only what the chat APIs write otherwise is
    converted. Of other rows the id is left, since those of ShareGPT repeat; media in a column
    become parts of the first question, as the chat APIs write them.
    """
    if isinstance(row, Mapping) and isinstance(messages := row.get("messages"), list):
        return {**row, "messages": [_of_chat_api(message) for message in messages]}
    media = _media(row)
    messages, tools = read_row({k: v for k, v in row.items() if k not in MEDIA} if media else row)
    if media:
        first = next(one for one in messages if one["role"] == "user")
        first["content"] = _with_media(row, media, first["content"])
    fields: dict[str, Any] = {"messages": messages}
    if isinstance(row.get("category"), str):
        fields["category"] = row["category"]
    if "template_arguments" in row:
        fields["template_arguments"] = row["template_arguments"]
    return fields | ({"tools": tools} if tools else {})


def _media(row: Any) -> list[str]:
    """Return the kinds of media in a row's columns: "image", "audio", "video"."""
    found = (name.removesuffix("s") for name in MEDIA if isinstance(row, Mapping) and row.get(name))
    return list(dict.fromkeys(found))


def _with_media(row: Mapping[str, Any], media: list[str], text: str) -> list[dict[str, Any]]:
    """Return the parts of a question with media; images stand where LLaVA's text has <image>."""
    found = row.get("image") or row.get("images")
    names = found if isinstance(found, list) else [found]
    if media != ["image"] or not all(isinstance(name, str) for name in names):
        return [*({"type": kind} for kind in media), {"type": "text", "text": text}]
    texts = text.split("<image>")
    texts = texts if len(texts) == len(names) + 1 else [""] * len(names) + [text]
    parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
    for name, after in zip(names, texts[1:], strict=True):
        parts += [{"type": "image", "image": name}, {"type": "text", "text": after}]
    return parts


def _of_chat_api(message: Any) -> Any:
    """Return a message of a chat API without what is empty, and with draftlab's names."""
    if not isinstance(message, Mapping):
        return message
    found = {key: value for key, value in message.items() if value not in (None, [])}
    if found.get("role") == "developer":
        found["role"] = "system"
    if isinstance(thoughts := found.pop("reasoning", None), str):
        found.setdefault("reasoning_content", thoughts)
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_with_read_arguments(call) for call in calls]
        found.setdefault("content", "")
    return found


def _with_read_arguments(call: Any) -> Any:
    """Return a call whose arguments, which chat APIs write as text, are read."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _json(function["arguments"], "arguments of a call")
    return {**call, "function": {**function, "arguments": arguments}}


def _listed(value: Any, what: str) -> Sequence[Any]:
    """Return a list, which may be written as JSON."""
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


def _of_columns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a row without turns of both sides: a pair, or prompts alone."""
    instances = row.get("instances")
    if instances:
        instance = _listed(instances, "instances")[0]
        if not isinstance(instance, Mapping):
            raise Dropped("an instance that is no record")
        row = {**instance, **row}
    for asked, answered in PAIRS:
        if isinstance(row.get(asked), str) and row.get(answered) not in (None, ""):
            return _of_pair(row, asked, answered)
    if (asked_turns := row.get("turns")) is not None:
        return _of_questions(_listed(asked_turns, "turns"))
    for asked in PROMPTS:
        if isinstance(row.get(asked), str):
            return [_question(row, asked)]
        if row.get(asked):  # messages, as trainers of preferences write prompts
            return _of_turns(_listed(row[asked], "a prompt"))
    raise Dropped("no column of turns")


def _of_questions(texts: Sequence[Any]) -> list[dict[str, Any]]:
    """Return user turns; before each later one is an empty answer, which the target replaces."""
    messages: list[dict[str, Any]] = []
    for text in texts:
        if messages:
            messages.append({"role": "assistant", "content": ""})
        messages.append({"role": "user", "content": _text(text)})
    return messages


def _question(row: Mapping[str, Any], asked: str) -> dict[str, Any]:
    question = row[asked]
    about = row.get("input") if asked == "instruction" else None
    if about and isinstance(about, str):
        question = f"{question}\n\n{about}"
    if question.strip():
        question = "\n\n".join([*_contexts(row.get("context")), question])
    return {"role": "user", "content": question}


def _of_pair(row: Mapping[str, Any], asked: str, answered: str) -> list[dict[str, Any]]:
    messages = [_question(row, asked)]
    if asked == "query":
        calls = _calls(_listed(row[answered], "calls of tools"))
        return [*messages, {"role": "assistant", "content": "", "tool_calls": calls}]
    answer = _answer(_first_of(row[answered]))
    thoughts = row.get("reasoning") or row.get("reasoning_content")
    if isinstance(thoughts, str) and "reasoning_content" not in answer:
        answer["reasoning_content"] = thoughts
    return [*messages, answer]


def _contexts(value: Any) -> list[str]:
    """Return the texts that a question is about: none, one or several."""
    texts = [value] if isinstance(value, str) else value or []
    if not _are_texts(texts):
        raise Dropped("a context that is no text")
    return [text for text in texts if text.strip()]


def _first_of(value: Any) -> str:
    """Return the text of an answer; of several answers, the first."""
    if isinstance(value, Mapping) and "text" in value:  # SQuAD's, with where they stand
        value = value["text"]
    if _are_texts(value):
        if not value:
            raise Dropped("a question without an answer")
        value = value[0]
    return _text(value)


def _are_texts(value: Any) -> bool:
    """Return whether a value is a list of texts."""
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return listed and all(isinstance(text, str) for text in value)


def _of_turns(turns: Sequence[Any]) -> list[dict[str, Any]]:
    messages = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise Dropped("a turn that is no record")
        name = turn.get("role", turn.get("from"))
        role = ROLES.get(str(name).lower())
        if role is None:
            raise Dropped(f"an unknown role, {str(name)[:20]!r}")
        calls = _asked_for(turn) if role == "assistant" else []
        text = _text(turn.get("content", turn.get("value")), may_be_none=bool(calls))
        if role == "call":
            found = _json(text, "calls of tools")
            calls = _calls(found if isinstance(found, list) else [found])
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            continue
        message: dict[str, Any] = {"role": role, "content": text}
        if role == "assistant":
            message = _answer(text)
            names = ("reasoning_content", "reasoning", "thinking")
            thoughts = next((turn[name] for name in names if turn.get(name)), None)
            if isinstance(thoughts, str):
                message["reasoning_content"] = thoughts
            if calls:
                message["tool_calls"] = calls
        elif role == "tool":
            message |= {
                k: turn[k] for k in ("name", "tool_call_id") if isinstance(turn.get(k), str)
            }
        messages.append(message)
    return messages


def _asked_for(turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an assistant's calls: several, or the single one of the first chat API."""
    if turn.get("tool_calls"):
        return _calls(_listed(turn["tool_calls"], "calls of tools"))
    call = turn.get("function_call")
    # Where any row of a Parquet column has a call, all others have one of nothing.
    nothing = isinstance(call, Mapping) and not any(call.values())
    return _calls([call]) if call and not nothing else []


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
    """Return an assistant's message, with reasoning separated from the text."""
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
        key = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        function = {"name": function["name"], "arguments": given}
        found.append({"type": "function", **key, "function": function})
    return found


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise Dropped("a tool that is no schema")
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _check(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, answered: bool = True
) -> None:
    spoken = [message["role"] for message in messages if message["role"] != "system"]
    if "user" not in spoken:
        raise Dropped("no user turn")
    if spoken[0] != "user":
        raise Dropped("begins with an answer")
    for message in messages:
        said = message["content"].strip() or message.get("tool_calls")
        if not said and message["role"] in ("user", *["assistant"] * answered):
            raise Dropped(f"an empty {'answer' if message['role'] == 'assistant' else 'question'}")
    try:
        json.dumps([messages, tools], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Dropped("half a surrogate pair") from None
    except (TypeError, ValueError):
        raise Dropped("values that JSON cannot hold") from None
