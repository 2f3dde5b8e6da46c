"""Parse an answer's tokens into the message that a server would return for it.

The next prompt of a conversation is rendered from this message. The template then decides what of
it stays: most templates drop the reasoning of earlier turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.errors import UserError
from draftlab.text.chat_template import RenderError, special_ids

_HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"})
_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT = ("<|channel>", "<channel|>")
_MAX_SECONDS = 10.0
"""Seconds that the regular expressions of a response template may take for one answer."""


class AnswerParser:
    """Parses the answers of a target.

    The tokenizer's own response template is used if it has one; else the channels of Harmony
    (gpt-oss), Gemma 4's channel of thoughts or <think> tags are read.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        # Some tokenizers list thousands of added tokens, which takes as long as an answer.
        added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        self._is_harmony = set(added.values()) >= _HARMONY
        self._controls = {
            i: str(tokenizer.convert_ids_to_tokens(i)) for i in special_ids(tokenizer)
        }
        self._controls |= {i: text for i, text in added.items() if "tool_call" in text}

    def parse(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], *, stopped: bool
    ) -> dict[str, Any]:
        """Return the assistant message of an answer: `content` and, if any, `reasoning_content`.

        Args:
            prompt_ids: the prompt, which may open the reasoning.
            token_ids: the answer.
            stopped: whether its last token is a stop token.

        Raises:
            RenderError: the answer calls a tool, has other control tokens than the family's, or
                cannot be parsed.
            UserError: the regular expressions of the response template do not end.
        """
        tokenizer = self.tokenizer
        if getattr(tokenizer, "response_template", None) is not None:
            try:
                parsed = self._template.parse(tokenizer, prompt_ids, token_ids)
            except TimeoutError:
                raise UserError(
                    "expected a response template that parses an answer within "
                    f"{_MAX_SECONDS:.0f} seconds, found one that takes longer",
                    where=f"response_template of {tokenizer.name_or_path}",
                    do="fetch the target again from a source that you trust, or remove "
                    "response_template from its tokenizer_config.json",
                ) from None
            except Exception as error:  # whatever a stranger's template makes the parser raise
                raise _refusal(f"what its response template cannot parse ({error})") from None
            return _message(**parsed)
        if self._is_harmony:
            return _parse_harmony(self._split_at_controls(token_ids))
        # A stop token need not be special: it may be any token of the vocabulary.
        parts = self._split_at_controls(token_ids[:-1] if stopped else token_ids)
        prompt_end = tokenizer.decode(list(prompt_ids[-8:]))
        return _parse_think(parts, prompt_end.rstrip().endswith(_OPEN))

    @cached_property
    def _template(self) -> _ResponseTemplate:
        return _ResponseTemplate(self.tokenizer.response_template)

    def raw_message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return an answer that cannot be parsed as a message of its whole text."""
        return {"role": "assistant", "content": self._decode(token_ids)}

    def _split_at_controls(self, token_ids: Sequence[int]) -> list[tuple[str, str]]:
        """Return the answer's control tokens, each with the text after it; the first is ""."""
        parts: list[tuple[str, list[int]]] = [("", [])]
        for i in token_ids:
            if i in self._controls:
                parts.append((self._controls[i], []))
            else:
                parts[-1][1].append(i)
        return [(control, self._decode(ids)) for control, ids in parts]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), clean_up_tokenization_spaces=False)
        return text


class _ResponseTemplate:
    """A tokenizer's response template, a stranger's, with an end of its regular expressions.

    Parts are parsed as text: no tool call is carried out, and other kinds have expressions that
    transformers compiles out of reach.
    """

    def __init__(self, source: Any) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        self._deadline = 0.0
        self._template = template = load_response_template(source)
        template.start_anchor_re = _BoundedPattern(template.start_anchor_re, self.seconds_left)
        for part in template.fields.values():
            part.content, part.content_args = "text", {}
            for name in ("open_re", "close_re"):
                if (pattern := getattr(part, name)) is not None:
                    setattr(part, name, _BoundedPattern(pattern, self.seconds_left))

    def parse(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], answer: Sequence[int]
    ) -> dict[str, Any]:
        """Return the parts of an answer by name; raise a TimeoutError after `_MAX_SECONDS`."""
        self._deadline = time.monotonic() + _MAX_SECONDS
        parts: dict[str, Any] = tokenizer.parse_response(
            list(answer), self._template, prefix=list(prompt)
        )
        return parts

    def seconds_left(self) -> float:
        if (left := self._deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return left


class _BoundedPattern:
    """The methods of a pattern (of the package regex) that the parser calls, with a time limit."""

    def __init__(self, pattern: Any, seconds_left: Callable[[], float]) -> None:
        self._pattern, self._seconds_left = pattern, seconds_left

    def search(self, *args: Any, **options: Any) -> Any:
        return self._pattern.search(*args, timeout=self._seconds_left(), **options)

    def finditer(self, text: str) -> Any:
        return self._pattern.finditer(text, timeout=self._seconds_left())


def _message(
    content: str | None = None,
    reasoning_content: str | None = None,
    thinking: str | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the message of an answer's parts, without the line ends beside its tags."""
    if unknown := [name for name, value in others.items() if value and name != "role"]:
        raise _refusal(f"the part {unknown[0]!r}")
    message = {"role": "assistant", "content": (content or "").lstrip("\n")}
    reasoning = (reasoning_content or thinking or "").strip("\n")
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _refusal(found: str) -> RenderError:
    return RenderError(
        f"expected an answer of text and reasoning, found {found}: draftlab does not carry out "
        "tool calls, so no turn can follow it"
    )


def _parse_harmony(parts: Sequence[tuple[str, str]]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"analysis": [], "final": []}
    channel = ""
    for control, text in parts:
        if control == "<|message|>" and channel:
            texts[channel].append(text)
        elif control == "<|channel|>" and text.strip() in texts:
            channel = text.strip()
        elif control not in _HARMONY | {"", "<|return|>"} or text.strip() not in ("", "assistant"):
            raise _refusal(f"{control}{text}"[:40])
    return _message("".join(texts["final"]), "\n".join(texts["analysis"]))


def _parse_think(parts: Sequence[tuple[str, str]], is_open: bool) -> dict[str, Any]:
    if parts[1:] and parts[1][0] == _THOUGHT[0]:  # Gemma 4's tags
        tags = dict(zip(_THOUGHT, (_OPEN, _CLOSE), strict=True))
        parts = [(c, t.removeprefix("thought") if c == _THOUGHT[0] else t) for c, t in parts]
        parts = [(tags.get(c, c), t) for c, t in parts]
    for control, _ in parts:
        if control not in ("", _OPEN, _CLOSE):
            raise _refusal(repr(control))
    text = "".join(control + text for control, text in parts)
    reasoning, closed, content = text.partition(_CLOSE)
    before, opened, rest = reasoning.partition(_OPEN)
    if closed or opened or is_open:
        return _message(before + content, rest) if opened else _message(content, before)
    return _message(text)
