"""Answers to prompts from a running server with OpenAI's completions interface (vLLM, SGLang, …).

Prompts are sent as token ids, so the server applies no chat template. vLLM returns the ids of the
answer (`return_token_ids`). A server that returns text only has it tokenised here, special tokens
included, and a line says so: such ids can differ from those that the target wrote.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from threading import Event
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, request_seed
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.connection import (
    Connection,
    answer_fault,
    error_text,
    in_threads,
    read_json,
    served_card,
)
from draftlab.servers.settings import RegenerateSettings

REPEATED = {408, 409, 429}
"""HTTP statuses below 500 of requests that may succeed later."""
TOO_LONG = re.compile(
    # OpenAI, vLLM and SGLang; the code of OpenAI; the type and an older message of llama.cpp
    "context length|context_length_exceeded|exceed_context_size_error|available context size",
    re.IGNORECASE,
)
"""What servers say, with HTTP status 400, of a prompt that does not fit with its answer."""
FREE_BYTES, _TOKEN_BYTES = 1 << 20, 200
"""Most bytes of an answer, and more for each token of the prompt and of what was asked for."""
_OTHER_SERVER = "use a server with OpenAI's completions interface, and see its log"
LINE_EVERY_S = 60.0
"""Seconds between two lines about requests that are repeated."""
FIRST_WAIT_S = 1.0
"""Seconds before the second attempt; each further wait is twice as long, at most a minute."""


def completion_body(
    model: str,
    prompt: Sequence[int],
    max_tokens: int,
    temperature: float,
    *,
    top_p: float = 1.0,
    top_k: int = -1,
) -> dict[str, Any]:
    """Return a request for a completion, as vLLM, SGLang and llama.cpp read it.

    It states all that a server would fill in from the model's generation_config.json.
    """
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        # Not in OpenAI's interface, but read by vLLM and SGLang:
        "top_k": top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "return_token_ids": True,
    }


class _NoRoom(Exception):
    """The server has no room for a prompt and its answer."""


class ServerAnswers:
    """A decoder for `draftlab.text.answers`: sends `regenerate.batch` requests at once.

    Args:
        settings: `server` has the server's address.
        tokenizer: the target's.
        vocab_size: rows of the target's embedding.

    Attributes:
        model: the server's name of the target.
        max_length: most tokens of a prompt and its answer on the server; None: it does not say.

    Raises:
        UserError: the server cannot be reached, or does not serve the named model.
    """

    def __init__(
        self,
        settings: RegenerateSettings,
        tokenizer: PreTrainedTokenizerBase,
        monitor: Monitor,
        vocab_size: int,
    ) -> None:
        self.settings, self.tokenizer, self.monitor = settings.server, tokenizer, monitor
        self.concurrency, self.vocab_size = settings.batch, vocab_size
        self._connection = Connection(self.settings.url or "")
        self._url = self._connection.url
        if self._connection.key_note:
            monitor.say(f"answers: {self._connection.key_note}")
        self._says_text, self._says_no_room, self._next_line = False, False, 0.0
        card = self._served_model()
        self.model: str = card["id"]
        self.max_length: int | None = card.get("max_model_len")  # of vLLM and SGLang
        length = self.max_length
        if length is not None and (type(length) is not int or length < 1):
            raise self._failure(
                "/v1/models",
                f"expected max_model_len to be a number of tokens, found {length!r}",
                _OTHER_SERVER,
            )
        monitor.say(
            f"answers: {self.model} at {self._url} writes them, {self.concurrency} requests at "
            "once; draftlab cannot see whether its weights are the target's"
        )

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        """Yield the answers in the order of the requests.

        A prompt for which the server has no room has a generation that ends with "no_room". That is
        how a server that does not state its `max_length` shows it.

        Raises:
            UserError: the server refused a request, or failed after all attempts.
        """

        def generate(request: Request, stopped: Event) -> Generation:
            return self._generate(request, max_length, stopped)

        with in_threads(generate, requests, self.concurrency) as futures:
            for future in futures:
                yield future.result()

    def _generate(self, request: Request, max_length: int, stopped: Event) -> Generation:
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
        }
        place = f"/v1/completions, prompt {request.id!r}"
        try:
            choices = self._post("/v1/completions", body, "choices", stopped, place)
        except _NoRoom as error:
            self._say_no_room(request, str(error))
            return Generation(request.id, (), "no_room", Counters(0), (), (), 0.0, 0.0)
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict) or not (
            choice.get("token_ids") is not None or isinstance(choice.get("text"), str)
        ):
            raise self._failure(
                place,
                f"expected one choice with token_ids or text, found {json.dumps(choices)[:200]}",
                _OTHER_SERVER,
            )
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise self._failure(place, f"the answer ended by {finish!r}", "see the server's log")
        tokens = choice.get("token_ids")
        if tokens is None:
            most = 2 * most + 16  # another division of the text can have more tokens
            if len(choice["text"]) > _TOKEN_BYTES * most:
                found = f"found a text of {len(choice['text']):,} characters"
                raise self._failure(
                    place, f"expected at most {most} tokens, {found}", _OTHER_SERVER
                )
            tokens = self._tokens_of_text(choice)
        if fault := answer_fault(tokens, self.vocab_size, most):
            raise self._failure(place, fault, _OTHER_SERVER)
        if finish == "stop" and not (tokens and tokens[-1] in request.stop_ids):
            tokens = [*tokens, self._stop_token(choice, request)]
        seconds = time.perf_counter() - started
        return Generation(request.id, tuple(tokens), finish, Counters(0), (), (), seconds, seconds)

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

    def _stop_token(self, choice: dict[str, Any], request: Request) -> int:
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
        raise self._failure(
            f"/v1/completions, prompt {request.id!r}",
            f"the answer ended at {token!r}, which is no stop token",
            "start the server without stop texts of its own",
        )

    def _served_model(self) -> dict[str, Any]:
        """Return what the server says of the named model, or of the only one there is."""
        models = self._post("/v1/models", None, "data", Event())
        do = "name one of them: regenerate.server.model"
        card = served_card(models, self.settings.model, where=self._url, do=do)
        if card is None:
            raise self._failure(
                "/v1/models",
                f"expected a list of models with their ids, found {json.dumps(models)[:200]}",
                _OTHER_SERVER,
            )
        return card

    def _post(
        self, path: str, body: dict[str, Any] | None, field: str, stopped: Event, place: str = ""
    ) -> Any:
        """Send a request (GET without a body) and return a field of its JSON answer.

        Refused and broken connections, time-outs, errors of the server (5xx) and `REPEATED` ones
        are repeated, until `stopped` is set.

        Args:
            place: where an error is; by default the path.

        Raises:
            UserError: the server refused the request, or failed after all attempts.
            _NoRoom: it refused the request as too long.
        """
        tokens = 0 if body is None else len(body["prompt"]) + body["max_tokens"]
        max_bytes = FREE_BYTES + _TOKEN_BYTES * tokens
        wait, attempts, timeout_s = FIRST_WAIT_S, self.settings.attempts, self.settings.timeout_s
        for attempt in range(1, attempts + 1):
            try:
                with self._connection.open(path, body, timeout_s=timeout_s) as answer:
                    return read_json(answer, max_bytes)[field]
            except urllib.error.HTTPError as error:
                if place_of := error.headers.get("Location"):
                    error.close()
                    raise self._failure(
                        place or path,
                        f"HTTP {error.code}: it redirects to {place_of}, where nothing was sent",
                        "if you trust that server, name its address: regenerate.server.url",
                    ) from None
                reason = f"HTTP {error.code}: {self._connection.without_key(error_text(error))}"
                if error.code == 400 and TOO_LONG.search(reason):
                    raise _NoRoom(reason) from None
                if error.code not in REPEATED and error.code < 500:
                    do = "check regenerate.server" + (", or remove this prompt" if place else "")
                    raise self._failure(place or path, reason, do) from None
            except (KeyError, TypeError) as error:
                reason = f"an answer without {field}: {error}"
            except (OSError, HTTPException, ValueError) as error:  # refused, broken off, not JSON
                reason = str(getattr(error, "reason", error) or type(error).__name__)
            if attempt < attempts:
                self._say_repeated(f"{reason} (attempt {attempt} of {attempts})")
            if attempt == attempts or stopped.wait(wait):
                break
            wait = min(2 * wait, 60.0)
        do = "start the server, and repeat the command: finished answers are kept"
        raise self._failure(place or path, f"{reason} ({attempt} attempts)", do)

    def _say_no_room(self, request: Request, reason: str) -> None:
        """Say what the server says of the first prompt that is too long for it."""
        if not self._says_no_room:
            self._says_no_room = True
            self.monitor.say(
                f"answers: the server has no room for prompt {request.id!r}; such prompts are left "
                f"out: {reason}"
            )

    def _say_repeated(self, reason: str) -> None:
        """Say that a request is repeated, once in `LINE_EVERY_S` for all of them."""
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self.monitor.say(f"answers: requests are repeated: {reason}")

    def _failure(self, place: str, reason: str, do: str) -> UserError:
        return UserError(
            f"the server gave no answer: {self._connection.without_key(reason)}",
            where=f"{self._url}{place}",
            do=do,
        )
