"""Conversations as token ids and answer spans, from the target's own chat template.

A span is what the target itself would write: from the end of the generation prompt to the answer's
closing tag, included. Where it ends comes from the template's `{% generation %}` markers, or, where
there are none, from renders of growing prefixes compared token by token. What cannot be trusted is
an error: a mask that is wrong trains a head on tokens nobody will ever draft.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draftlab.chat.template import (
    Encoded,
    Messages,
    RenderError,
    encode,
    marked_blocks,
    render_text,
    special_ids,
    stop_ids,
    template_sha256,
    tokenizer_sha256,
)

__all__ = [
    "RenderError",
    "Rendered",
    "coloured",
    "prompt_ids",
    "render",
    "stop_ids",
    "template_sha256",
    "tokenizer_sha256",
]

REGENERATE = "let the target answer the prompts itself (regenerate.enabled: true)"


@dataclass(frozen=True)
class Rendered:
    """A conversation's token ids [T] and spans [T].

    spans[t] is 0 outside answers and 1, 2, … in the first, second … answer with its closing tag.
    """

    token_ids: tuple[int, ...]
    spans: tuple[int, ...]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> tuple[int, ...]:
    """Token ids of the conversation with the generation prompt: what the target answers to."""
    return encode(tokenizer, render_text(tokenizer, messages, generation_prompt=True)).ids


def render(tokenizer: PreTrainedTokenizerBase, messages: Messages, *, where: str = "") -> Rendered:
    """Token ids and spans of a conversation with its answers.

    Args:
        messages: roles and texts; adjacent assistant turns are distinct spans.
        where: what an error names, such as the conversation's id.

    Raises:
        RenderError: the template refuses this conversation, rewrites its history, or leaves open
            where an answer ends.
        UserError: the tokenizer has no template, or is not a fast one.
    """
    try:
        full = encode(tokenizer, render_text(tokenizer, messages))
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        prompts = [_prompt(tokenizer, messages, i, full) for i in turns]
        spans = [0] * len(full.ids)
        previous = 0
        ends = _ends(tokenizer, messages, turns, prompts, full)
        for number, (prompt, end) in enumerate(zip(prompts, ends, strict=True), 1):
            start = len(prompt.ids)
            if not previous <= start < end:
                raise RenderError(
                    f"expected answer {number} to follow the one before and to have tokens, found "
                    f"tokens {start} to {end} after one that ends at {previous}"
                )
            spans[start:end] = [number] * (end - start)
            previous = end
    except RenderError as error:
        raise RenderError(
            error.what, where=where or error.where, do=error.do or REGENERATE
        ) from None
    return Rendered(full.ids, tuple(spans))


def _prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, turn: int, full: Encoded
) -> Encoded:
    """What the target saw before writing messages[turn]; checked to begin the full render."""
    prompt = encode(tokenizer, render_text(tokenizer, messages[:turn], generation_prompt=True))
    if not full.text.startswith(prompt.text):
        same = _common(full.text, prompt.text)
        raise RenderError(
            f"the chat template rewrites history: the prompt of message {turn} has "
            f"{prompt.text[same : same + 40]!r} where the whole conversation has "
            f"{full.text[same : same + 40]!r}"
        )
    if full.ids[: len(prompt.ids)] != prompt.ids:
        raise RenderError(
            f"the answer in message {turn} melts with its prompt into one token "
            f"({messages[turn]['content'][:20]!r} after {prompt.text[-20:]!r}): "
            "the target could not have written it so"
        )
    return prompt


def _ends(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    turns: list[int],
    prompts: list[Encoded],
    full: Encoded,
) -> list[int]:
    """End of each answer (token index, exclusive): from the markers, else from the prefixes."""
    specials = special_ids(tokenizer)
    grown = [encode(tokenizer, render_text(tokenizer, messages[: i + 1])) for i in turns]
    blocks = marked_blocks(tokenizer, messages)
    distrust = "it has no {% generation %} markers"
    if blocks is not None and len(blocks) != len(turns):
        distrust = f"its markers enclose {len(blocks)} parts in {len(turns)} answers"
    elif blocks is not None:
        try:
            return [
                _end_by_markers(block, prompt, more, full, specials)
                for block, prompt, more in zip(blocks, prompts, grown, strict=True)
            ]
        except RenderError as error:
            distrust = error.what
    try:
        return [
            _end_by_prefixes(messages[i]["content"], prompt, more, full, specials)
            for i, prompt, more in zip(turns, prompts, grown, strict=True)
        ]
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
    block: tuple[int, int],
    prompt: Encoded,
    grown: Encoded,
    full: Encoded,
    specials: frozenset[int],
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
    turn_end = _common(full.text, grown.text)
    outer = end
    while outer < len(full.ids) and full.offsets[outer][0] < turn_end:
        if full.ids[outer] in specials:
            return outer + 1
        if not _blank(full, outer):
            break
        outer += 1
    return end


def _end_by_prefixes(
    content: str, prompt: Encoded, grown: Encoded, full: Encoded, specials: frozenset[int]
) -> int:
    # The turn as it stands both with and without what follows it: a template may add an
    # end-of-text after the last turn only, which no answer in the middle has.
    begin, turn_end = len(prompt.text), _common(full.text, grown.text)
    turn = full.text[begin:turn_end]
    said, blank = content.strip(), len(turn) - len(turn.lstrip())
    if not turn[blank:].startswith(said):
        raise RenderError(
            f"after the generation prompt it writes {(turn or full.text[begin:])[:40]!r} where the "
            f"answer is {content[:40]!r}"
        )
    start, said_end = len(prompt.ids), begin + (blank + len(said) if said else 0)
    # The first control token after the text closes the answer; what the template puts behind it
    # (Qwen's newline) the target never writes. Without one, the last visible character ends it.
    end = _tokens_before(full, said_end, start)
    while end < len(full.ids) and full.offsets[end][0] < turn_end and full.ids[end] not in specials:
        end += 1
    if end < len(full.ids) and full.offsets[end][0] < turn_end:
        end += 1
    else:
        end = _tokens_before(full, begin + len(turn.rstrip()), start)
    if grown.ids[:end] != full.ids[:end]:
        raise RenderError(
            f"the answer {content[:40]!r} becomes other tokens when the conversation goes on"
        )
    return end


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
