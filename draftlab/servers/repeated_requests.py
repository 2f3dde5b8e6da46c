"""Requests to servers that are repeated: by refusals, time-outs and broken connections."""

from __future__ import annotations

import json
import re
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from http.client import HTTPException
from threading import Event, Lock
from typing import Any, TypeVar

from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers.connection import FREE_BYTES, Connection, error_text, read_json, served_card
from draftlab.servers.settings import ServerSettings

REPEATED = {408, 409, 429}
"""HTTP statuses below 500 of requests that may succeed later."""
TOO_LONG = re.compile(
    # OpenAI, vLLM and SGLang; the code of OpenAI; the type and an older message of llama.cpp
    "context length|context_length_exceeded|exceed_context_size_error|available context size",
    re.IGNORECASE,
)
"""Matches messages by which servers refuse a prompt that is too long, with HTTP status 400."""
TOKEN_BYTES = 400
"""Most bytes of an answer for each token of the prompt and of what was asked for."""
OTHER_SERVER = "use a server with OpenAI's completions interface, and see its log"
LINE_EVERY_S = 60.0
"""Seconds between two lines about requests that are repeated."""
FIRST_WAIT_S = 1.0
"""Seconds before the second attempt; each further wait is twice as long, at most a minute."""
_LAST_S = 60.0
"""Seconds for which a server that gave no answer is asked last; one request then tries it again."""
Result = TypeVar("Result")


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


class NoRoom(Exception):
    """The server has no room for a prompt and its answer."""


def with_field(name: str) -> Callable[[Any, Connection], dict[str, Any]]:
    """Return a function that returns an answer with a field; one without it is repeated."""

    def read(answer: Any, _: Connection) -> dict[str, Any]:
        if not isinstance(answer, dict) or name not in answer:
            raise ValueError(f"an answer without {name}")
        return answer

    return read


class RepeatedRequests:
    """Sends the requests of a stage.

    Args:
        stage: whose lines they are, such as "answers".
        section: of the recipe that names the servers.
        settings: attempts of a request, the time for one, and the name of the model.
    """

    def __init__(
        self, stage: str, section: str, settings: ServerSettings, monitor: Monitor
    ) -> None:
        self.stage, self.section = stage, section
        self.settings, self.monitor = settings, monitor
        self._next_line, self._last_until = 0.0, dict[Connection, float]()
        self._lock, self._under_way = Lock(), Counter[Connection]()

    def connect(self, url: str) -> tuple[Connection, dict[str, Any]]:
        """Return a connection, and what the server says of the named model, or of its only one.

        Raises:
            UserError: the server cannot be reached, or does not serve the model.
        """
        connection = Connection(url)
        if connection.key_note:
            self.monitor.say(f"{self.stage}: {connection.key_note}")
        path = "/v1/models"
        models = self.post([connection], path, None, with_field("data"), Event())
        do = f"name one of them: {self.section}.model"
        card = served_card(models, self.settings.model, where=connection.url, do=do)
        if card is None:
            found = f"expected a list of models with their ids, found {json.dumps(models)[:200]}"
            raise self.failure(connection, path, found, OTHER_SERVER)
        return connection, card

    def post(
        self,
        connections: Sequence[Connection],
        path: str,
        body: dict[str, Any] | Callable[[Connection], dict[str, Any]] | None,
        read: Callable[[Any, Connection], Result],
        stopped: Event,
        place: str = "",
    ) -> Result:
        """Send a request (GET without a body) and return what `read` makes of its JSON answer.

        Refused and broken connections, time-outs, errors of the server (5xx) and `REPEATED` ones
        are repeated, until `stopped` is set.

        Args:
            connections: to equal servers. The one with the fewest requests under way is asked,
                after a failure the next one; those last that gave no answer, and then a wait
                follows.
            body: the request, or what makes that of an attempt.
            read: gets the answer and who gave it; its OSError or ValueError is a reason to repeat
                the request.
            place: where an error is; by default the path.

        Raises:
            UserError: a server refused the request, or all failed after all attempts.
            NoRoom: it refused the request as too long.
        """
        wait, timeout_s = FIRST_WAIT_S, self.settings.timeout_s
        attempts = self.settings.attempts * len(connections)
        left = list[Connection]()
        for attempt in range(1, attempts + 1):
            left = left or list(connections)
            connection = self._choose(left)
            sent = body(connection) if callable(body) else body
            tokens = 0 if sent is None else len(sent["prompt"]) + sent["max_tokens"]
            max_bytes = FREE_BYTES + TOKEN_BYTES * tokens
            try:
                with connection.open(path, sent, timeout_s=timeout_s) as stream:
                    answer = read_json(stream, max_bytes)
                found = read(answer, connection)
                self._last_until.pop(connection, None)
                return found
            except urllib.error.HTTPError as error:
                if error.headers.get("Location"):
                    error.close()
                    do = f"if you trust that server, name its address in {self.section}"
                    reason = connection.reason(error)
                    raise self.failure(connection, place or path, reason, do) from None
                reason = f"HTTP {error.code}: {connection.without_key(error_text(error))}"
                if error.code == 400 and TOO_LONG.search(reason):
                    raise NoRoom(reason) from None
                if error.code not in REPEATED and error.code < 500:
                    do = f"check {self.section}" + (", or remove this prompt" if place else "")
                    raise self.failure(connection, place or path, reason, do) from None
                if error.code >= 500:  # others are of a server that is busy
                    self._last_until[connection] = time.monotonic() + _LAST_S
            except (OSError, HTTPException, ValueError) as error:  # refused, broken off, not JSON
                reason = str(getattr(error, "reason", error) or type(error).__name__)
                self._last_until[connection] = time.monotonic() + _LAST_S
            finally:
                with self._lock:
                    self._under_way[connection] -= 1
            if attempt < attempts:
                at = f" at {connection.url}" * (len(connections) > 1)
                self._say_repeated(f"{reason} (attempt {attempt} of {attempts}{at})")
            if attempt % len(connections) and not stopped.is_set():
                continue
            if attempt == attempts or stopped.wait(wait):
                break
            wait = min(2 * wait, 60.0)
        do = "start the server, and repeat the command: finished work is kept"
        raise self.failure(connection, place or path, f"{reason} ({attempt} attempts)", do)

    def _choose(self, left: list[Connection]) -> Connection:
        """Take the server out of a list that is asked next."""
        with self._lock:
            now = time.monotonic()
            silent = {one for one in left if now < self._last_until.get(one, 0.0)}
            chosen = min(left, key=lambda one: (one in silent, self._under_way[one]))
            if chosen in self._last_until:
                self._last_until[chosen] = now + _LAST_S  # others wait for what comes of this one
            self._under_way[chosen] += 1
        left.remove(chosen)
        return chosen

    def _say_repeated(self, reason: str) -> None:
        """Say that a request is repeated, once in `LINE_EVERY_S` for all of them."""
        if (now := time.monotonic()) >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self.monitor.say(f"{self.stage}: requests are repeated: {reason}")

    def failure(self, connection: Connection, place: str, reason: str, do: str) -> UserError:
        """Return the error of a request, without the key, which a server may repeat."""
        return UserError(
            f"the server gave no answer: {connection.without_key(reason)}",
            where=f"{connection.url}{place}",
            do=do,
        )
