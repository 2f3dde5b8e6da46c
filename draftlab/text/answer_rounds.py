"""The rounds of conversations whose answers are generated: requests and parsed messages.

An answer's tokens become the message that a server would return for it, of which the next prompt of
the conversation is rendered. The template then decides what of it stays: most templates drop the
reasoning of earlier turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.servers.settings import RegenerateSettings
from draftlab.target_model.images import image_ids
from draftlab.target_model.model import Target
from draftlab.text.chat_template import (
    Chat,
    Encoded,
    RenderError,
    encode_prompts,
    omitted_roles,
    special_ids,
)
from draftlab.text.conversations import Answer, Conversation
from draftlab.text.decode import Decode


@dataclass
class Draft:
    """A conversation whose answers are being generated.

    Attributes:
        rounds: the turns that precede each answer.
        first: the token ids of the first round's prompt.
        messages: the conversation so far.
        end: why no further turn is answered, if some are not.
    """

    prompt: Conversation
    temperature: float
    rounds: list[list[dict[str, Any]]]
    first: array[int]
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    end: str = ""

    def conversation(self) -> Conversation:
        """Return the answered conversation, without the turns after its last answer."""
        roles = [message["role"] for message in self.messages]
        while roles and roles[-1] != "assistant":
            roles.pop()
        return replace(
            self.prompt,
            messages=self.messages[: len(roles)],
            temperature=self.temperature,
            answers=tuple(self.answers),
        )


NO_ROOM_ON_SERVER = "no room for the prompt and an answer in the server's context"
"""The reason for which a prompt is left out that a server refused as too long."""


def no_room(max_length: int) -> str:
    """Return the reason for which a prompt of `max_length` or more tokens is left out."""
    return f"no room for an answer in {max_length:,} positions"


@dataclass(frozen=True)
class AnswerGenerator:
    """Generates the answers of one chunk at a time.

    Attributes:
        seed: of the sampling noise.
        stops: ids of the tokens that end an answer.
        max_length: maximum length of a prompt and its answer together, in tokens.
        target: reads images; None: there are none.
    """

    tokenizer: PreTrainedTokenizerBase
    settings: RegenerateSettings
    seed: int
    stops: frozenset[int]
    max_length: int
    target: Target | None = None

    @cached_property
    def _parser(self) -> AnswerParser:
        return AnswerParser(self.tokenizer)

    def answer(
        self, chunk: list[Draft], decode: Decode, count_answer: Callable[[int], None]
    ) -> None:
        """Generate the answers of a chunk, round by round.

        Args:
            count_answer: called with the number of tokens of each answer.
        """
        for number in range(max(len(draft.rounds) for draft in chunk)):
            pending: dict[str, tuple[Draft, tuple[int, ...], Request]] = {}
            asked = [draft for draft in chunk if not draft.end and number < len(draft.rounds)]
            for draft in asked:
                draft.messages += draft.rounds[number]
            prompts: Iterable[Encoded | RenderError]
            if number:
                chats = (Chat.of(draft.prompt, draft.messages) for draft in asked)
                prompts = encode_prompts(self.tokenizer, chats)
            else:
                prompts = (Encoded("", tuple(draft.first)) for draft in asked)
            for draft, prompt in zip(asked, prompts, strict=True):
                if request := self._request(draft, number, prompt):
                    assert isinstance(prompt, Encoded)
                    pending[request.id] = draft, prompt.ids, request
            if not pending:
                return
            requests = [request for *_, request in pending.values()]
            max_length = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
            for generation in decode(requests, max_length):
                draft, prompt_ids, _ = pending[generation.id]
                if generation.finish == "no_room":
                    draft.end = NO_ROOM_ON_SERVER
                    continue
                self._add_answer(draft, prompt_ids, generation)
                count_answer(len(generation.token_ids))

    def _request(self, draft: Draft, number: int, prompt: Encoded | RenderError) -> Request | None:
        """Return the request of round `number`; None if it cannot be answered."""
        if isinstance(prompt, RenderError):
            draft.end = prompt.what
            return None
        ids, room = prompt.ids, self.max_length - len(prompt.ids)
        if room < 1:
            draft.end = no_room(self.max_length)
            return None
        new_messages = draft.messages[-len(draft.rounds[number]) - 1 :]
        if number and (roles := omitted_roles(prompt.text, new_messages)):
            draft.end = f"the chat template leaves out the {roles[0]} message"
            return None
        try:
            if self.target is not None:
                ids = image_ids(self.target, ids, draft.prompt.images)
        except UserError as error:  # of these images, or of the target's positions for any
            draft.end = error.what
            return None
        return Request(
            # The id is a key of the sampling noise, so each round has its own.
            f"{draft.prompt.id}/{number}" if number else draft.prompt.id,
            ids,
            min(self.settings.max_new_tokens, room),
            Sampling(draft.temperature, self.settings.top_k, self.settings.top_p, self.seed),
            self.stops,
        )

    def _add_answer(
        self, draft: Draft, prompt_ids: tuple[int, ...], generation: Generation
    ) -> None:
        ids = generation.token_ids
        finish = "stop" if generation.finish == "stop" else "length"
        stopped = finish == "stop"
        try:
            message = self._parser.parse(prompt_ids, ids, stopped=stopped)
        except RenderError as error:
            message, draft.end = self._parser.raw_message(ids), error.what
        if not (stopped or message["content"] or draft.end):
            draft.end = "the answer before them was cut in its reasoning"
        draft.messages.append(message)
        draft.answers.append(Answer(prompt_ids, ids, finish))


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
