"""Answers to prompts from running servers with OpenAI's completions interface (vLLM, SGLang, …).

Prompts are sent as token ids, so the server applies no chat template. vLLM and SGLang return the
ids of the answer (`return_token_ids`), llama.cpp has them in its log-probabilities (`n_probs`). A
server that returns text only has it tokenised here, special tokens included, and a line says so:
such ids can differ from those that the target wrote.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from threading import Event, Semaphore
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, request_seed
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.connection import Connection, answer_fault
from draftlab.servers.repeated_requests import (
    OTHER_SERVER,
    TOKEN_BYTES,
    NoRoom,
    RepeatedRequests,
    completion_body,
    with_field,
)
from draftlab.servers.settings import RegenerateSettings

Fail = Callable[[str, str], UserError]
"""A function that returns the error of an answer: what was found, and what to do."""


class ServerAnswers:
    """Decodes requests for `draftlab.text.answers`, `regenerate.batch` at once for all threads.

    Args:
        settings: `server` has the addresses.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.

    Attributes:
        connections: to the servers.
        model: the servers' name of the target.
        max_length: most tokens of a prompt and its answer on each server; None: none says it.

    Raises:
        UserError: a server cannot be reached, or they do not serve one model.
    """

    def __init__(
        self,
        settings: RegenerateSettings,
        tokenizer: PreTrainedTokenizerBase,
        monitor: Monitor,
        vocab_size: int,
    ) -> None:
        self.tokenizer, self.monitor = tokenizer, monitor
        self.concurrency, self.vocab_size = settings.batch, vocab_size
        self._free = Semaphore(settings.batch)
        self._says_text, self._says_no_room = False, False
        server = settings.server
        self._requests = RepeatedRequests("answers", "regenerate.server", server, monitor)
        served = [self._requests.connect(url) for url in server.url or ()]
        self.connections = [connection for connection, _ in served]
        self.model: str = served[0][1]["id"]
        self.max_length: int | None = None
        for connection, card in served:
            fail = partial(self._requests.failure, connection, "/v1/models")
            if card["id"] != self.model:
                fault = f"expected {self.model}, as the first one serves, found {card['id']}"
                raise fail(fault, "name servers of one model: regenerate.server.url")
            length = card.get("max_model_len")  # of vLLM and SGLang
            if length is None:
                continue
            if type(length) is not int or length < 1:
                fault = f"expected max_model_len to be a number of tokens, found {length!r}"
                raise fail(fault, OTHER_SERVER)
            self.max_length = min(length, self.max_length or length)
        monitor.say(
            f"answers: {self.model} at {', '.join(one.url for one in self.connections)} writes "
            f"them, {self.concurrency} requests at once; draftlab cannot see whether its weights "
            "are the target's"
        )

    def generate(self, request: Request, max_length: int, stopped: Event) -> Generation:
        """Return the answer to a request; nothing is sent, or sent again, once `stopped` is set.

        A prompt for which the server has no room has a generation that ends with "no_room". That is
        how a server that does not state its `max_length` shows it.

        Raises:
            UserError: the server refused the request, read another prompt, or failed after all
                attempts.
            CancelledError: `stopped` was set.
        """
        sampling, started = request.sampling, time.perf_counter()
        most = min(request.max_new_tokens, max_length - len(request.prompt_ids))
        body = completion_body(
            self.model,
            request.prompt_ids,
            most,
            sampling.temperature,
            top_p=sampling.top_p or 1.0,
            top_k=sampling.top_k or -1,
        ) | {
            "seed": request_seed(request),
            "stop_token_ids": sorted(request.stop_ids),
            "skip_special_tokens": False,
            "n_probs": 1,
        }
        path, place = "/v1/completions", f"/v1/completions, prompt {request.id!r}"

        def read(answer: Any, connection: Connection) -> tuple[list[int], str]:
            fail = partial(self._requests.failure, connection, place)
            return self._read(request, most, with_field("choices")(answer, connection), fail)

        try:
            with self._free:
                if stopped.is_set():
                    raise CancelledError
                post = self._requests.post
                tokens, finish = post(self.connections, path, body, read, stopped, place)
        except NoRoom as error:
            if not self._says_no_room:
                self._says_no_room = True
                self.monitor.say(
                    f"answers: the server has no room for prompt {request.id!r}; such prompts are "
                    f"left out: {error}"
                )
            return Generation(request.id, (), "no_room", Counters(0), (), (), 0.0, 0.0)
        seconds = time.perf_counter() - started
        return Generation(request.id, tuple(tokens), finish, Counters(0), (), (), seconds, seconds)

    def _read(
        self, request: Request, most: int, answer: dict[str, Any], fail: Fail
    ) -> tuple[list[int], str]:
        """Return the token ids of an answer of at most so many, and why it ended."""
        choices = answer["choices"]
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict) or not (
            choice.get("token_ids") is not None or isinstance(choice.get("text"), str)
        ):
            raise fail(
                f"expected one choice with token_ids or text, found {json.dumps(choices)[:200]}",
                OTHER_SERVER,
            )
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise fail(f"the answer ended by {finish!r}", "see the server's log")
        _check_prompt(request, answer, choice, fail)
        tokens = _token_ids(choice)
        if tokens is None:
            most = 2 * most + 16  # another division of the text can have more tokens
            if len(choice["text"]) > TOKEN_BYTES * most:
                found = f"found a text of {len(choice['text']):,} characters"
                raise fail(f"expected at most {most} tokens, {found}", OTHER_SERVER)
            tokens = self._tokens_of_text(choice)
        if fault := answer_fault(tokens, self.vocab_size, most):
            raise fail(fault, OTHER_SERVER)
        if finish == "stop" and not (tokens and tokens[-1] in request.stop_ids):
            tokens = [*tokens, self._stop_token(choice, request, fail)]
        return tokens, finish

    def _tokens_of_text(self, choice: dict[str, Any]) -> list[int]:
        """Return the ids of an answer's text."""
        if not self._says_text:
            self._says_text = True
            self.monitor.say(
                "warning: answers: the server returns no token_ids; its text is tokenised, which "
                "can give other tokens than the target wrote"
            )
        text = choice["text"]
        if choice["finish_reason"] == "length":
            text = text.rstrip("\ufffd")  # in place of a character that was cut
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _stop_token(self, choice: dict[str, Any], request: Request, fail: Fail) -> int:
        """Return the stop token that the server left out: the one it names, or the end of sequence.

        Raises:
            UserError: it names something else, such as a stop text, or there is no end of sequence.
        """
        named = choice.get("stop_reason")
        if named is None:
            named = choice.get("matched_stop")  # SGLang's name of it
        token = self.tokenizer.eos_token_id if named is None else named
        if type(token) is int and token in request.stop_ids:
            return token
        raise fail(
            f"the answer ended at {token!r}, which is no stop token",
            "start the server without stop texts of its own",
        )


def _check_prompt(
    request: Request, answer: dict[str, Any], choice: dict[str, Any], fail: Fail
) -> None:
    """Check that the server read the prompt that was sent, as far as it says what it read."""
    read, usage = choice.get("prompt_token_ids"), answer.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if read is not None:
        if read == list(request.prompt_ids):
            return
    elif count in (None, len(request.prompt_ids)):
        return
    raise fail(
        f"expected an answer to the {len(request.prompt_ids):,} tokens of the prompt, found "
        "that the server read others: it cuts prompts, or adds tokens",
        "start the server without options that change prompts",
    )


def _token_ids(choice: dict[str, Any]) -> Any:
    """Return the ids that an answer states, by vLLM's and SGLang's or llama.cpp's name; or None."""
    logprobs = choice.get("logprobs")
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if choice.get("token_ids") is None and isinstance(content, list):
        return [token.get("id") if isinstance(token, dict) else token for token in content]
    return choice.get("token_ids")
