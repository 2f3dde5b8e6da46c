"""A conversation with a target whose answers a head drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from tokenizers.decoders import DecodeStream

from draftlab.engine.base_drafter import Drafter
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine, decoding_threads
from draftlab.engine.generation_state import Sequence
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.heads.head import DraftHead
from draftlab.target_model.model import Target
from draftlab.target_model.settings import TemplateArguments
from draftlab.text.chat_template import prompt_ids, stop_ids

Show = Callable[[str, bool], None]
"""Shows a piece of an answer, and whether it is an accepted draft."""


class Chat:
    """The messages of a conversation, and the engine that answers them with a head's drafts.

    Args:
        k: drafts a step.
        max_new_tokens, max_length: most tokens of an answer, and of the whole conversation.
        system: content of a system message; None: no such message.
        arguments: values of the chat template's variables.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        tokenizer: Any,
        *,
        k: int,
        sampling: Sampling,
        max_new_tokens: int,
        max_length: int,
        system: str | None = None,
        arguments: TemplateArguments | None = None,
    ) -> None:
        self.target, self.tokenizer, self.arguments = target, tokenizer, arguments
        self.sampling, self.max_new_tokens = sampling, max_new_tokens
        self.max_length = min(max_length, target.max_length)
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.stops = stop_ids(tokenizer, target.folder)
        self.engine = self._engine(new_drafter(head, k, draft_probs=sampling.temperature > 0))

    def _engine(self, drafter: Drafter | None) -> Engine:
        """Return an engine that has compiled and captured what it needs."""
        engine = Engine(
            self.target, drafter, batch=1, max_length=self.max_length, expect=False,
            cpu_prepacked=True,
        )  # fmt: skip
        request = self._request([*self.messages, {"role": "user", "content": "."}])
        self._generate(engine, replace(request, max_new_tokens=16, stop_ids=frozenset()))
        return engine

    def _generate(self, engine: Engine, request: Request) -> Generation:
        with decoding_threads(self.target):
            (generation,) = engine.generate([request])
        return generation

    def answer(self, text: str, show: Show) -> Generation:
        """Answer a message, show the pieces of the answer as they come, and return its generation;
        raise a `UserError` if the conversation has no room for it.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        request = self._request(asked)
        pieces = _Pieces(self.tokenizer, request, show)
        self.engine.on_step = pieces.add
        generation = self._generate(self.engine, request)
        self.messages = [*asked, {"role": "assistant", "content": pieces.text}]
        return generation

    def plain(self) -> Generation:
        """Decode the last answer again without drafts, and return its generation."""
        return self._generate(self._plain, self._request(self.messages[:-1]))

    @cached_property
    def _plain(self) -> Engine:
        return self._engine(None)

    def _request(self, messages: list[dict[str, Any]]) -> Request:
        ids = prompt_ids(self.tokenizer, messages, arguments=self.arguments)
        if len(ids) >= self.max_length:
            raise UserError(
                f"expected a conversation of fewer than {self.max_length:,} tokens, found "
                f"{len(ids):,}",
                do="begin another one, or raise --max-length, up to the target's "
                f"{self.target.max_length:,}",
            )
        number = sum(message["role"] == "user" for message in messages)
        return Request(f"turn {number}", ids, self.max_new_tokens, self.sampling, self.stops)


class _Pieces:
    """Decodes the tokens of an answer as they come, to `text`."""

    def __init__(self, tokenizer: Any, request: Request, show: Show) -> None:
        self.text, self.show, self.request = "", show, request
        self.backend = tokenizer.backend_tokenizer
        self.stream = DecodeStream(skip_special_tokens=True)
        self.decoded = len(request.prompt_ids)

    def add(self, sequence: Sequence) -> None:
        """Decode and show the tokens of a sequence that came with its last step."""
        accepted = sequence.steps[-1][1] if sequence.steps else 0
        for i, token in enumerate(sequence.tokens[self.decoded :]):
            # Bytes of a character that is not complete come with its last token.
            piece = self.stream.step(self.backend, token) or ""
            self.text += piece
            if piece:
                self.show(piece, i < accepted)
        self.decoded = len(sequence.tokens)
