"""Parse an answer's tokens into the message that a server would return for it.

The next prompt of a conversation is rendered from this message. The template then decides what of
it stays: most templates drop the reasoning of earlier turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.text.chat_template import RenderError, special_ids

_HARMONY = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|end|>"})
_OPEN, _CLOSE = "<think>", "</think>"
_THOUGHT = ("<|channel>", "<channel|>")


class AnswerParser:
    """Parses the channels of Harmony (gpt-oss), Gemma 4's channel of thoughts, or <think> tags."""

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
            RenderError: the answer calls a tool, or has other control tokens than the family's.
        """
        if self._is_harmony:
            return _parse_harmony(self._split_at_controls(token_ids))
        # A stop token need not be special: it may be any token of the vocabulary.
        parts = self._split_at_controls(token_ids[:-1] if stopped else token_ids)
        prompt_end = self.tokenizer.decode(list(prompt_ids[-8:]))
        return _parse_think(parts, prompt_end.rstrip().endswith(_OPEN))

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


def _message(content: str, reasoning: str = "") -> dict[str, Any]:
    """Return the message of an answer's parts, without the line ends beside its tags."""
    message = {"role": "assistant", "content": content.lstrip("\n")}
    reasoning = reasoning.strip("\n")
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
