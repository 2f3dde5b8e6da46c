"""The schema of one line of a JSONL file of conversations (docs/formats.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from draftlab.target_model.settings import TemplateArguments


class StrictModel(BaseModel):
    """A model that rejects unknown keys and converts no types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ContentPart(BaseModel):
    """One part of a multi-part message, as chat APIs write it: text, an image, audio …"""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, Field(min_length=1)]
    text: str | None = None

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
        """Return the text of all text parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content if part.type == "text")

    @property
    def media(self) -> set[str]:
        """Return the kinds of all parts that are not text: "image", "input_audio" …"""
        if isinstance(self.content, str):
            return set()
        return {part.type.removesuffix("_url") for part in self.content} - {"text"}


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class AnswerLine(StrictModel):
    """The tokens of one answer that the target generated."""

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
    answers: list[AnswerLine] = []
    tools: list[dict[str, Any]] = []
    template_arguments: TemplateArguments = {}
