"""What the target answers to and what it would write, for each answer of a conversation.

An answer's tokens are those that the template writes after the generation prompt, up to the tag
that closes it. Where that is comes from the template's `{% generation %}` markers, or, where there
are none, from the texts of the message: its reasoning, its content, the functions it calls. What
cannot be trusted is an error: a mask that is wrong trains a head on tokens nobody will draft.

Every answer is rendered as the last of its conversation, as the target wrote it. Many templates
write an answer otherwise once the conversation goes on: they drop its reasoning, or close it with
another tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.text.chat_template import (
    Encoded,
    Messages,
    RenderError,
    Tools,
    encode,
    marked_blocks,
    render_text,
    special_ids,
)

REGENERATE = "let the target answer the prompts itself (regenerate.enabled: true)"
_THOUGHTS = re.compile(r"</?think>")


@dataclass(frozen=True)
class Turn:
    """One answer.

    Attributes:
        prompt_ids: what it answers to, generation prompt included.
        token_ids: what the target writes, closing tag included.
    """

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


def turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None = None,
    *,
    where: str = "",
) -> list[Turn]:
    """The answers of a conversation, in order.

    Args:
        where: what an error names, such as the conversation's id.

    Raises:
        RenderError: the template refuses this conversation, puts an answer elsewhere than behind
            its generation prompt, or leaves open where it ends.
        UserError: the tokenizer has no template, or is not a fast one.
    """
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    try:
        render_text(tokenizer, messages, tools)  # also where there is no answer
        return [
            _turn(tokenizer, messages[: i + 1], tools, number)
            for number, i in enumerate(numbers, 1)
        ]
    except RenderError as error:
        raise RenderError(
            error.what, where=where or error.where, do=error.do or REGENERATE
        ) from None


def _turn(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools | None, number: int
) -> Turn:
    """The last message's; it is answer `number`."""
    asked = render_text(tokenizer, messages[:-1], tools, generation_prompt=True)
    prompt = encode(tokenizer, asked)
    full = encode(tokenizer, render_text(tokenizer, messages, tools))
    start = len(prompt.ids)
    if not full.text.startswith(prompt.text):
        same = _common(full.text, prompt.text)
        raise RenderError(
            f"the chat template rewrites history: the prompt of message {len(messages) - 1} has "
            f"{prompt.text[same : same + 40]!r} where the whole conversation has "
            f"{full.text[same : same + 40]!r}"
        )
    if full.ids[:start] != prompt.ids:
        raise RenderError(
            f"the answer in message {len(messages) - 1} melts with its prompt into one token "
            f"({full.text[len(prompt.text) :][:20]!r} after {prompt.text[-20:]!r}): "
            "the target could not have written it so"
        )
    end = _end(tokenizer, messages, tools, number, prompt, full)
    if end <= start:
        raise RenderError(f"expected answer {number} to have tokens, found none")
    return Turn(prompt.ids, full.ids[start:end])


def _end(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    tools: Tools | None,
    number: int,
    prompt: Encoded,
    full: Encoded,
) -> int:
    """End of the last answer (token index, exclusive): from the markers, else from its texts."""
    specials = special_ids(tokenizer)
    blocks = marked_blocks(tokenizer, messages, tools)
    distrust = "it has no {% generation %} markers"
    if blocks is not None and len(blocks) != number:
        distrust = f"its markers enclose {len(blocks)} parts in {number} answers"
    elif blocks is not None:
        try:
            end = _end_by_markers(blocks[-1], prompt, full, specials)
            _check_written(messages[-1], full.text[len(prompt.text) :])
            return end
        except RenderError as error:
            distrust = error.what
    try:
        header = "" if any(_texts(messages[-1])) else _header(tokenizer, messages, tools, prompt)
        return _end_by_texts(messages[-1], header, prompt, full, specials)
    except RenderError as error:
        raise RenderError(
            f"the chat template does not tell where answers begin and end: {distrust}, and "
            f"{error.what}"
        ) from None


def _common(one: str, other: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _blank(full: Encoded, index: int) -> bool:
    start, end = full.offsets[index]
    return not full.text[start:end].strip()


def _tokens_before(full: Encoded, char: int, first: int) -> int:
    """Index of the first token at or after `first` that begins at or after `char`."""
    end = first
    while end < len(full.ids) and full.offsets[end][0] < char:
        end += 1
    return end


def _end_by_markers(
    block: tuple[int, int], prompt: Encoded, full: Encoded, specials: frozenset[int]
) -> int:
    begin, stop = block
    low, high = sorted((begin, len(prompt.text)))
    if stop < len(prompt.text) or full.text[low:high].strip():
        raise RenderError(
            f"its markers begin {full.text[begin:][:30]!r} but the generation prompt ends before "
            f"{full.text[len(prompt.text) :][:30]!r}"
        )
    start = len(prompt.ids)
    end = inner = _tokens_before(full, stop, start)
    # Templates that mark `<|im_end|>\n`: the newline is the template's, the target stops before it.
    while inner > start and _blank(full, inner - 1):
        inner -= 1
    if inner > start and full.ids[inner - 1] in specials:
        return inner
    # Templates that leave the closing tag outside of the markers: it is the target's nevertheless.
    for outer in range(end, len(full.ids)):
        if full.ids[outer] in specials:
            return outer + 1
        if not _blank(full, outer):
            break
    return end


def _check_written(message: Mapping[str, Any], turn: str) -> None:
    """Refuses a turn that leaves out reasoning or a call: the target did not answer so."""
    for kind, text in _texts(message):
        if kind != "answer" and text not in turn:
            raise RenderError(f"it leaves out the {kind} {text[:40]!r}")


def _header(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Tools | None, prompt: Encoded
) -> str:
    """What the template writes before the text of an answer that has none."""
    something = {**messages[-1], "content": "☃"}
    text = render_text(tokenizer, [*messages[:-1], something], tools)
    return text[len(prompt.text) :].partition("☃")[0]


def _end_by_texts(
    message: Mapping[str, Any],
    header: str,
    prompt: Encoded,
    full: Encoded,
    specials: frozenset[int],
) -> int:
    begin, start = len(prompt.text), len(prompt.ids)
    said_end = begin + (len(header) or _said(message, full, begin, start, specials))
    # The first control token after the texts closes the answer; what the template puts behind it
    # (Qwen's newline) the target never writes. Without one, the last visible character ends it.
    for end in range(_tokens_before(full, said_end, start), len(full.ids)):
        if full.ids[end] in specials:
            return end + 1
    return _tokens_before(full, len(full.text.rstrip()), start)


def _said(
    message: Mapping[str, Any], full: Encoded, begin: int, start: int, specials: frozenset[int]
) -> int:
    """Where the message's texts end, in characters after the prompt; all must be there."""
    turn, place = full.text[begin:], 0
    texts = list(_texts(message))
    for number, (kind, text) in enumerate(texts):
        found = turn.find(text, place)
        if found < 0:
            raise RenderError(
                f"after the generation prompt it writes {turn[place:][:40]!r} where the {kind} is "
                f"{text[:40]!r}"
            )
        if number == 0 and kind == "answer" and turn[:found].strip():
            # Nothing but a header of control tokens may stand before a plain answer: an empty
            # thought, say, is nothing that a thinking target writes.
            first = _tokens_before(full, begin, start)
            if (
                full.ids[first] not in specials
                or full.ids[_tokens_before(full, begin + found, start) - 1] not in specials
            ):
                raise RenderError(
                    f"after the generation prompt it writes {turn[:40]!r} where the answer is "
                    f"{text[:40]!r}"
                )
        place = found + len(text)
    if message.get("tool_calls"):  # whose arguments each template writes in a way of its own
        place = max(place, turn.rfind("}") + 1)
    return place


def _texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What an answer says, by what it is, in the order in which templates write it."""
    pieces = [piece.strip() for piece in _THOUGHTS.split(message.get("content") or "")]
    thoughts = [(message.get("reasoning_content") or "").strip(), *pieces[:-1]]
    yield from (("reasoning", piece) for piece in thoughts if piece)
    if pieces[-1]:
        yield "answer", pieces[-1]
    for call in message.get("tool_calls") or ():
        yield "function", call["function"]["name"]
