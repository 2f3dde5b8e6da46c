"""Conversations as token ids and answer spans, from the target's own chat template.

A span is what the target itself would write: from the end of the generation prompt to the answer's
closing tag, included; reasoning and tool calls are part of it where the template writes them there.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftlab.text.assistant_turns import REGENERATE, Turn, turns
from draftlab.text.chat_template import (
    Messages,
    RenderError,
    Tools,
    encode,
    render_text,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)

__all__ = [
    "REGENERATE",
    "RenderError",
    "Rendered",
    "Turn",
    "coloured",
    "prompt_ids",
    "render",
    "stop_ids",
    "template_sha256",
    "tokenizer_sha256",
    "turns",
]


@dataclass(frozen=True)
class Rendered:
    """A conversation's token ids [T] and spans [T].

    spans[t] is 0 outside answers and 1, 2, … in the first, second … answer with its closing tag.
    """

    token_ids: tuple[int, ...]
    spans: tuple[int, ...]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools | None = None
) -> tuple[int, ...]:
    """Token ids of the conversation with the generation prompt: what the target answers to."""
    return encode(tokenizer, render_text(tokenizer, messages, tools, generation_prompt=True)).ids


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None = None,
    *,
    where: str = "",
) -> Rendered:
    """Token ids and spans of a whole conversation.

    Args:
        messages: roles and texts; adjacent assistant turns are distinct spans.
        tools: that the conversation's answers may call.
        where: what an error names, such as the conversation's id.

    Raises:
        RenderError: of `turns`; or earlier answers stand in the whole conversation otherwise than
            the target wrote them, so that one row of tokens cannot hold them all.
        UserError: the tokenizer has no template, or is not a fast one.
    """
    found = turns(tokenizer, messages, tools, where=where)
    ids = encode(tokenizer, render_text(tokenizer, messages, tools)).ids
    spans = [0] * len(ids)
    for number, turn in enumerate(found, 1):
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        if ids[:end] != turn.prompt_ids + turn.token_ids:
            what = "the prompt of answer" if ids[:start] != turn.prompt_ids else "answer"
            raise RenderError(
                f"{what} {number} becomes other tokens when the conversation goes on",
                where=where,
                do=REGENERATE,
            )
        spans[start:end] = [number] * len(turn.token_ids)
    return Rendered(ids, tuple(spans))


def coloured(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The conversation with tokens told apart by shade; answers in green, the rest dim.

    Line ends are shown as ⏎; a token that is only part of a character as the vocabulary writes it.
    """
    text = Text()
    for t, (token, span) in enumerate(zip(rendered.token_ids, rendered.spans, strict=True)):
        piece = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        if "\ufffd" in piece or not piece:
            piece = str(tokenizer.convert_ids_to_tokens(token))
        shade = ("black on green", "black on bright_green") if span else ("dim", "dim underline")
        text.append(piece.replace("\n", "⏎\n"), style=shade[t % 2])
    return text
