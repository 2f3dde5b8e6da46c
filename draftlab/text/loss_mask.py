"""The loss mask: which tokens of a conversation the target itself would write.

An answer begins after the generation prompt and ends with the tag that closes it, which is found
behind the texts of the message: its reasoning, its content and the functions that it calls.
Anything uncertain is an error, because a wrong mask trains a head on tokens that the target never
writes.

Every answer is rendered as the last message of its conversation, as the target wrote it. Many
templates rewrite an answer when the conversation continues: they drop its reasoning, or close it
with another tag.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.text.chat_template import (
    Chat,
    Encoded,
    RenderError,
    answer_stops,
    chat_template,
    count_equal,
    encode,
    render,
    render_text,
    rendered,
    special_ids,
)
from draftlab.text.conversations import Answer

REGENERATE = "let the target answer the prompts itself (regenerate.enabled: true)"
_MARK = "☃"
_THINK_TAGS = re.compile(r"</?think>")


def find_turns(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[tuple[Chat, str]]
) -> Iterator[tuple[str, list[Answer]] | RenderError]:
    """Yield the text of each conversation and its answers, in order, or why there are none.

    The text is that of the last prompt, which may have turns that its answer removes, and that of
    all turns.

    A `RenderError` says that the template refuses this conversation, does not write an answer
    directly after its generation prompt, or does not show where the answer ends.

    Args:
        conversations: each with its name in errors, such as its id.

    Raises:
        UserError: the tokenizer has no template or is not a fast tokenizer; or as `render`.
    """
    parts = [list(_chats(chat)) for chat, _ in conversations]
    results = render(tokenizer, list(chain.from_iterable(parts)))
    for chats, (_, where) in zip(parts, conversations, strict=True):
        own = list(islice(results, len(chats)))
        try:
            text = "".join(rendered(one) for one in own[-2:])
            ends = (end for end in chats if not end.generation_prompt)
            triples = zip(ends, map(rendered, own[::2]), map(rendered, own[1::2]), strict=False)
            found = text, [_last_turn(tokenizer, *one) for one in triples]
        except RenderError as error:
            where, do = where or error.where, error.do or REGENERATE
            yield RenderError(error.what, where=where, do=do)
        else:
            yield found


def _chats(chat: Chat) -> Iterator[Chat]:
    """Yield what is rendered: prompt and end of each answer, and the whole conversation at last."""
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant":
            yield replace(chat, messages=chat.messages[:index], generation_prompt=True)
            yield replace(chat, messages=chat.messages[: index + 1])
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        yield chat


def _last_turn(tokenizer: PreTrainedTokenizerBase, chat: Chat, before: str, whole: str) -> Answer:
    """Return the last message, an answer, from the texts before and after it."""
    index = len(chat.messages) - 1
    whole = _as_written(tokenizer, chat, before, whole)
    prompt, full = (encode(tokenizer, text, images=chat.images) for text in (before, whole))
    start = len(prompt.ids)
    if not full.text.startswith(prompt.text):
        same = count_equal(full.text, prompt.text)
        raise RenderError(
            f"the chat template rewrites history: the prompt of message {index} has "
            f"{prompt.text[same : same + 40]!r} where the whole conversation has "
            f"{full.text[same : same + 40]!r}"
        )
    if full.ids[:start] != prompt.ids:
        raise RenderError(
            f"the answer in message {index} shares a token with its prompt "
            f"({full.text[len(prompt.text) :][:20]!r} after {prompt.text[-20:]!r}): "
            "the target could not have written it so"
        )
    try:
        end = _answer_end(tokenizer, chat, prompt, full)
    except RenderError as error:
        raise RenderError(
            f"the chat template does not show where answers begin and end: {error.what}"
        ) from None
    if end <= start:
        raise RenderError(f"expected tokens of the answer in message {index}, found none")
    answer, stops = full.ids[start:end], answer_stops(tokenizer)
    if stops.isdisjoint(full.ids[start:]):
        answer += _stop_of_next_turn(tokenizer)
    return Answer(prompt.ids, answer, "stop")


@lru_cache(maxsize=8)
def _stop_of_next_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the stop token that begins the turn behind an answer, if it does, as GLM's <|user|>.

    A template then writes no token that ends an answer; the target writes this one.
    """
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": _MARK}
    try:
        text = render_text(tokenizer, Chat([user, answer, user]))
    except RenderError:
        return ()
    first = encode(tokenizer, text.rpartition(_MARK)[2]).ids[:1]
    return first if answer_stops(tokenizer).issuperset(first) else ()


def _as_written(tokenizer: PreTrainedTokenizerBase, chat: Chat, before: str, whole: str) -> str:
    """Return the conversation with the last answer as the target writes it behind its prompt."""
    texts = list(_texts(chat.messages[-1]))
    reasoning = [text for kind, text in texts if kind == "reasoning"]
    answer = "".join(text for kind, text in texts if kind == "answer")
    turn = whole.removeprefix(before)
    if whole.startswith(before) and all(text in turn for text in reasoning):
        return whole
    written = written_answer(tokenizer, chat, before, reasoning, answer)
    if written is None and not whole.startswith(before):
        written = _behind_rewritten_history(chat, before, whole)
    return whole if written is None else written


def _behind_rewritten_history(chat: Chat, prompt: str, whole: str) -> str | None:
    """Return the prompt with the last answer, where a template changes what precedes them.

    Mistral's drops a system prompt once there is an answer, and gpt-oss's the thoughts of a call
    of a tool. The turn that is answered, and the generation prompt, are in both texts.

    Returns:
        None: that turn is another one in the whole conversation.
    """
    common = bisect_left(range(len(prompt)), True, key=lambda n: prompt[-n - 1 :] not in whole)
    shared = prompt[len(prompt) - common :]
    asked = next((m["content"] for m in reversed(chat.messages[:-1]) if m["content"]), "").strip()
    if not asked or asked not in shared:
        return None
    return prompt + whole[whole.rindex(shared) + common :]


def _answer_end(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: Encoded, full: Encoded
) -> int:
    """Return the end of the last answer (token index, exclusive), from its texts.

    A stop token after the texts ends the answer; Kimi-K3's writes other special tokens before it.
    Else the first special token closes it. The target does not write what follows (Qwen's newline).
    Without a special token the last visible character ends it.
    """
    message, specials, start = chat.messages[-1], special_ids(tokenizer), len(prompt.ids)
    header = "" if any(_texts(message)) else _header(tokenizer, chat, prompt)
    length = len(header) or _texts_length(message, prompt, full, specials)
    first = _first_token_from(full, len(prompt.text) + length, start)
    for closing in (answer_stops(tokenizer), specials):
        for end in range(first, len(full.ids)):
            if full.ids[end] in closing:
                return end + 1
    return _first_token_from(full, len(full.text.rstrip()), start)


def _first_token_from(full: Encoded, char: int, first: int) -> int:
    """Return the first token, counted from `first`, that begins at or after `char`."""
    index = first
    while index < len(full.ids) and full.offsets[index][0] < char:
        index += 1
    return index


def _header(tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: Encoded) -> str:
    """Return what the template writes before the text of an answer, if that text is empty."""
    messages = [*chat.messages[:-1], {**chat.messages[-1], "content": _MARK}]
    text = render_text(tokenizer, replace(chat, messages=messages))
    return text[len(prompt.text) :].partition(_MARK)[0]


def _texts_length(
    message: Mapping[str, Any], prompt: Encoded, full: Encoded, specials: frozenset[int]
) -> int:
    """Return the characters from the prompt's end to the end of the message's last text.

    Raises:
        RenderError: a text is missing, or something other than a header precedes the answer.
    """
    begin, start = len(prompt.text), len(prompt.ids)
    turn, end = full.text[begin:], 0
    for number, (kind, text) in enumerate(_texts(message)):
        position = turn.find(text, end)
        if position < 0:
            raise _unexpected_text(turn[end:], kind, text)
        if number == 0 and kind == "answer" and turn[:position].strip():
            # Only a header of special tokens may precede a plain answer. An empty <think> block,
            # for example, is nothing that a reasoning target writes.
            first = _first_token_from(full, begin, start)
            last = _first_token_from(full, begin + position, start) - 1
            if full.ids[first] not in specials or full.ids[last] not in specials:
                raise _unexpected_text(turn, kind, text)
        end = position + len(text)
    if message.get("tool_calls"):  # each template writes the arguments in its own format
        end = max(end, turn.rfind("}") + 1)
    return end


def _unexpected_text(turn: str, kind: str, text: str) -> RenderError:
    return RenderError(
        f"after the generation prompt it writes {turn[:40]!r} where the {kind} is {text[:40]!r}"
    )


def _texts(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of each part of an answer, in the order that templates use."""
    *thoughts, answer = (part.strip() for part in _THINK_TAGS.split(message.get("content") or ""))
    for thought in ((message.get("reasoning_content") or "").strip(), *thoughts):
        if thought:
            yield "reasoning", thought
    if answer:
        yield "answer", answer
    for call in message.get("tool_calls") or ():
        yield "function", call["function"]["name"]


_TAGS = (
    ("<think>\n", "\n</think>\n\n", ""),  # DeepSeek R1, QwQ
    ("<think>", "</think>", ""),  # DeepSeek V3.1
    ("<|channel>thought\n", "\n<channel|>", "<|think|>"),  # Gemma 4
)
"""What targets write before and after their reasoning, and a text of the prompts that let them
reason."""


def written_answer(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, prompt: str, reasoning: Sequence[str], text: str
) -> str | None:
    """Return a conversation's text in which the last answer is as the target writes it.

    Args:
        prompt: the text before the answer, with the generation prompt.
        reasoning, text: the parts of the answer.

    Returns:
        None: the generation prompt does not end in tags, or not in those of such an answer.
    """
    if not text or len(reasoning) > 1 or chat.messages[-1].get("tool_calls"):
        return None
    plain = replace(chat, messages=[*chat.messages[:-1], {"role": "assistant", "content": _MARK}])
    rendered = render_text(tokenizer, plain)
    header, _, closing = rendered.rpartition(_MARK)
    if not prompt.startswith(header):
        header = header.removesuffix("</think>")
    if not prompt.startswith(header):
        return None
    opened, template = prompt[len(header) :], chat_template(tokenizer)
    for begin, end, mode in _TAGS:
        if reasoning and opened == begin:
            return f"{prompt}{reasoning[0]}{end}{text}{closing}"
        if reasoning and not opened and end.strip() in template and mode in prompt:
            return f"{prompt}{begin}{reasoning[0]}{end}{text}{closing}"
        if not reasoning and opened in (begin + end, begin + end.lstrip("\n")):
            return f"{prompt}{text}{closing}"
    return None
