"""Conversations: the schema of their JSONL files (docs/formats.md), reading, writing, counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from draftlab.errors import UserError
from draftlab.files import atomic_path, parse_json
from draftlab.formatting import count_text
from draftlab.settings import describe_errors
from draftlab.target_model.image_files import MARK, ImageFile, Images, content_parts
from draftlab.target_model.settings import TemplateArguments
from draftlab.text.chat_rows import Dropped, as_line


class StrictModel(BaseModel, extra="forbid", strict=True):
    """A model that rejects unknown keys and converts no types."""


class ContentPart(BaseModel, extra="allow", strict=True):
    """One part of a multi-part message, as chat APIs write it: text, an image, audio …

    An image may have the name of its file, relative to that of the conversations.
    """

    type: Annotated[str, Field(min_length=1)]
    text: str | None = None
    image: Any = None

    @property
    def file(self) -> str | None:
        """Return the name of an image's file; None: it is none, or from elsewhere."""
        name = self.image if self.type == "image" else None
        known = isinstance(name, str) and name and "://" not in name and name[:5] != "data:"
        return name if known else None

    @property
    def is_read(self) -> bool:
        """Return whether it is a text or an image of a file."""
        return self.type == "text" or self.file is not None

    @model_validator(mode="after")
    def _check_text(self) -> ContentPart:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type text needs a text")
        return self


class FunctionCall(StrictModel):
    """A function's name and its arguments."""

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any]


class ToolCall(StrictModel):
    """A tool call, as chat APIs write it."""

    function: FunctionCall
    type: Literal["function"] = "function"
    id: str | None = None


class Message(StrictModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(min_length=1)]
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Message:
        if self.role != "assistant" and (self.reasoning_content is not None or self.tool_calls):
            raise ValueError("only an assistant has reasoning_content or tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it, without the absent keys."""
        return {**self.model_dump(exclude_none=True), "content": self.text}

    @property
    def text(self) -> str:
        """Return the text of all text parts, with `MARK` for each image of a user's."""
        if isinstance(self.content, str):
            return self.content
        texts = (MARK if part.file else part.text or "" for part in self.content if part.is_read)
        return "".join(texts)

    @property
    def images(self) -> list[str]:
        """Return the names of the files of images."""
        parts = () if isinstance(self.content, str) else self.content
        return [name for part in parts if (name := part.file)]

    @property
    def media(self) -> set[str]:
        """Return the kinds of all parts that are neither text nor a user's image of a file."""
        parts = () if isinstance(self.content, str) else self.content
        others = (p for p in parts if not p.is_read or (p.file and self.role != "user"))
        kinds = {part.type.removesuffix("_url") for part in others}
        return kinds | {"U+FDD0"} if self.text.count(MARK) != len(self.images) else kinds


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class Answer:
    """One answer, as the token ids that the target generated; they are never re-tokenized.

    Attributes:
        prompt_ids: the token ids that the target answered.
        token_ids: the answer, including a final stop token.
        finish: "stop", or "length" (the answer then has no stop token).
    """

    __pydantic_config__ = StrictModel.model_config

    prompt_ids: tuple[TokenId, ...]
    token_ids: tuple[TokenId, ...]
    finish: Literal["stop", "length"]


Id = Annotated[
    str,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Field(min_length=1),
]


class ConversationLine(StrictModel):
    """One conversation."""

    id: Id | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    source: str | None = None
    category: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    answers: tuple[Answer, ...] = ()
    tools: list[dict[str, Any]] = []
    template_arguments: TemplateArguments = {}


LINE_HELP = (
    'a line is {"id": …, "messages": [{"role": "system" | "user" | "assistant", '
    '"content": text}, …], "source": …, "category": …, "template_arguments": {…}}; '
    "all but messages may be left out. Rows of ShareGPT, of the chat APIs, pairs such as "
    "instruction and response, and prompts alone are read, too"
)


@dataclass(frozen=True)
class Conversation:
    """The messages of one conversation and their origin.

    Attributes:
        id: unique in its file.
        messages: [{"role", "content"}, …]; answers may have `reasoning_content` and `tool_calls`.
        source: the data set or file that the conversation comes from.
        temperature: the sampling temperature of `answers`; None if the target did not write them.
        answers: the target's own answers, one per assistant turn; empty for given answers.
        media: kinds of the parts that are not read ("audio", …); `messages` does not hold them.
        images: in order; each has a `MARK` in a user's message before the first answer.
        tools: JSON schemas of the functions that the answers may call.
        category: what the conversation is about; None: it is not known.
        template_arguments: values of the chat template's variables.
    """

    id: str
    messages: list[dict[str, Any]]
    source: str
    temperature: float | None = None
    answers: tuple[Answer, ...] = ()
    media: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    category: str | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    images: Images = ()

    @property
    def has_answer(self) -> bool:
        """Return whether there is an assistant turn, and every one says something."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        said = ("content", "tool_calls", "reasoning_content")
        return bool(answers) and all(any(map(m.get, said)) for m in answers)

    def to_json(self) -> str:
        """Return one line of JSON, without the newline."""
        names = iter(image.name for image in self.images)
        fields = {
            "id": self.id,
            "messages": [_with_parts(m, names) for m in self.messages]
            if self.images
            else self.messages,
            "source": self.source,
            "temperature": self.temperature,
            "answers": [vars(answer) for answer in self.answers],
            **({"tools": list(self.tools)} if self.tools else {}),
            **({"category": self.category} if self.category else {}),
        }
        if self.template_arguments:
            fields["template_arguments"] = self.template_arguments
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _with_parts(message: dict[str, Any], names: Iterator[str]) -> dict[str, Any]:
    """Return a message with its images as parts, which take the next names."""
    if MARK not in message["content"]:
        return message
    parts = [
        {**part, "image": next(names)} if part["type"] == "image" else part
        for part in content_parts(message["content"])
    ]
    return {**message, "content": parts}


def split_rounds(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the turns before each answer, without given answers.

    A tool's result answers a call that the target may not make, so the rounds end before it.
    """
    rounds: list[list[dict[str, Any]]] = [[]]
    for message in takewhile(lambda m: m["role"] != "tool", messages):
        if message["role"] != "assistant":
            rounds[-1].append(message)
        elif rounds[-1]:
            rounds.append([])
    return rounds if rounds[-1] else rounds[:-1]


def answer_id(prompt_id: str, sample: int) -> str:
    """Return the id of answer number `sample` to a prompt: `prompt-7`, `prompt-7~1`, …"""
    return f"{prompt_id}~{sample}" if sample else prompt_id


def parse_conversation(
    line: bytes, path: Path, number: int, *, do: str = LINE_HELP
) -> Conversation:
    """Parse line `number` of `path`. A conversation without an id gets the id file:number.

    Args:
        do: the advice of errors.

    Raises:
        UserError: the line is not valid; the error names file and line.
    """
    try:
        parsed = ConversationLine.model_validate_json(line)
    except ValidationError:
        parsed = _parse_with_json(line, number, where=f"{path}:{number}", do=do)
    asked = list(takewhile(lambda message: message.role != "assistant", parsed.messages))
    late = {"later image" for one in parsed.messages[len(asked) :] if one.images}
    return Conversation(
        parsed.id or f"{path.stem}:{number}",
        [message.for_template() for message in parsed.messages],
        parsed.source or path.name,
        parsed.temperature,
        parsed.answers,
        tuple(sorted(set().union(*(message.media for message in parsed.messages)) | late)),
        tuple(parsed.tools),
        parsed.category,
        parsed.template_arguments,
        tuple(ImageFile(path.parent, name) for one in parsed.messages for name in one.images),
    )


def _parse_with_json(line: bytes, number: int, *, where: str, do: str) -> ConversationLine:
    """Parse a line that pydantic's own, faster parser refuses.

    It may begin with a byte order mark, as Windows editors write one, or be a row of another form
    (`chat_rows.py`). Otherwise this finds the words of the error.
    """
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        value = parse_json(text)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"expected Unicode text, found half a surrogate pair: {error}", where=where, do=do
        ) from None
    except ValueError as error:
        # The words of json count lines within this one.
        why: object = error
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {min(error.pos, len(text.rstrip())) + 1}"
        raise UserError(
            "expected a JSON object in UTF-8 on each line, found "
            f"{line[:60].decode(errors='replace').strip() or 'an empty line'!r}: {why}",
            where=where,
            do=do,
        ) from None
    try:
        return ConversationLine.model_validate_json(text)
    except ValidationError as error:
        wrong = describe_errors(error, "the line")
    try:
        return ConversationLine.model_validate(as_line(value))
    except Dropped as reason:
        if isinstance(value, dict):
            wrong = f"expected messages, or a row of another form, found {reason}"
    except ValidationError:
        pass
    raise UserError(wrong, where=where, do=do)


def iterate_conversations(path: Path, *, do: str = LINE_HELP) -> Iterator[Conversation]:
    """Yield the conversations of a JSONL file, line by line.

    Args:
        do: the advice of errors in a line.

    Raises:
        UserError: a line is not valid, or repeats an id.
    """
    first_line: dict[str, int] = {}
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                conversation = parse_conversation(line, path, number, do=do)
                if conversation.id in first_line:
                    raise UserError(
                        f"expected unique ids, found {conversation.id!r} here and on line "
                        f"{first_line[conversation.id]}",
                        where=f"{path}:{number}",
                        do="rename one, or leave ids out of all lines",
                    )
                first_line[conversation.id] = number
                yield conversation
    except OSError as error:
        raise UserError(
            f"expected a readable JSONL file of conversations, found: {error.strerror}",
            where=path,
            do=f'give a path, "embedded" or "embedded:heldout". {LINE_HELP}',
        ) from None


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations as JSONL, in order and atomically."""
    with atomic_path(path) as temporary, open(temporary, "x", encoding="utf-8") as file:
        file.writelines(conversation.to_json() + "\n" for conversation in conversations)


MOST = 5
"""Number of reasons that are reported. Reasons quote texts, so there may be many of them."""


class Reasons:
    """Counts by reason, and the first id of each reason."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, reason: str, id_: str, count: int = 1) -> None:
        """Add to the count of a reason."""
        self.counts[reason] += count
        self.first.setdefault(reason, id_)

    def lines(self, text: str, noun: str) -> Iterator[str]:
        """Yield a line for each of the most frequent reasons: `text`, their count of `noun`s."""
        for reason, count in self.counts.most_common(MOST):
            yield f"{text} {count_text(count, noun)} (first: {self.first[reason]}): {reason}"
        if len(self.counts) > MOST:
            yield f"{text} {count_text(self.counts.total(), noun)} in all"
