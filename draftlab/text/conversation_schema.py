"""One line of a JSONL file of conversations, as strictly as it is read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Unknown keys and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Part(BaseModel):
    """A part of a message, as chat APIs write those of several: text, or something else."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Annotated[str, Field(min_length=1)]
    text: str | None = None

    @model_validator(mode="after")
    def _said(self) -> Part:
        if self.type == "text" and self.text is None:
            raise ValueError("a part of type text needs a text")
        return self


class Function(Strict):
    """A function and what it is called with."""

    name: Annotated[str, Field(min_length=1)]
    arguments: dict[str, Any]


class ToolCall(Strict):
    """A call of a function, as chat APIs write it."""

    function: Function
    type: Literal["function"] = "function"
    id: str | None = None


class Message(Strict):
    """A turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Field(min_length=1)]
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _answers(self) -> Message:
        if self.role != "assistant" and (self.reasoning_content is not None or self.tool_calls):
            raise ValueError("only an assistant has reasoning_content or tool_calls")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates read it; what was not given is left out."""
        given = self.model_dump(exclude_none=True)
        return {**given, "content": self.text}

    @property
    def text(self) -> str:
        """What is said in words."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or "" for part in self.content if part.type == "text")

    @property
    def media(self) -> set[str]:
        """Kinds of its parts that are no text."""
        if isinstance(self.content, str):
            return set()
        return {part.type.removesuffix("_url") for part in self.content} - {"text"}


class GivenAnswer(Strict):
    """An answer as the target wrote it."""

    prompt_ids: list[int]
    token_ids: list[int]
    finish: Literal["stop", "length"]


class Line(Strict):
    """A conversation."""

    id: Annotated[str, Field(min_length=1)] | None = None
    messages: Annotated[list[Message], Field(min_length=1)]
    source: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    answers: list[GivenAnswer] = []
    tools: list[dict[str, Any]] = []
