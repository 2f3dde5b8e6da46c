"""Answers to prompts from a running server with OpenAI's completions interface (vLLM, SGLang, …).

Prompts are sent as token ids, so the server applies no chat template. vLLM returns the ids of the
answer (`return_token_ids`). A server that returns text only has it tokenised here, special tokens
included, and a line says so: such ids can differ from those that the target wrote.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from threading import Event
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, request_seed
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.text.settings import RegenerateSettings

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the key that is sent to the server, if it is set."""
FIRST_WAIT_S = 1.0
"""Seconds before the second attempt; each further wait is twice as long, at most a minute."""


class ServerAnswers:
    """A decoder for `draftlab.text.answers`: sends `regenerate.batch` requests at once.

    Args:
        settings: `server` has the server's address.
        tokenizer: the target's.

    Raises:
        UserError: the server cannot be reached, or does not serve the named model.
    """

    def __init__(
        self, settings: RegenerateSettings, tokenizer: PreTrainedTokenizerBase, monitor: Monitor
    ) -> None:
        self.settings, self.tokenizer, self.monitor = settings.server, tokenizer, monitor
        self.concurrency = settings.batch
        self._url = (self.settings.url or "").rstrip("/").removesuffix("/v1")
        self._stopped = Event()
        self._says_text = False
        self.model = self._served_model()
        monitor.say(
            f"answers: {self.model} at {self._url} writes them, {self.concurrency} requests at "
            "once; draftlab cannot see whether its weights are the target's"
        )

    def __call__(self, requests: Sequence[Request], max_length: int) -> Iterator[Generation]:
        """Yield the answers in the order of the requests.

        Raises:
            UserError: the server refused a request, or failed after all attempts.
        """
        with ThreadPoolExecutor(self.concurrency) as pool:
            futures = [pool.submit(self._generate, request, max_length) for request in requests]
            try:
                for future in futures:
                    yield future.result()
            finally:
                self._stopped.set()  # ends the waits of requests that are repeated
                pool.shutdown(wait=True, cancel_futures=True)
                self._stopped.clear()

    def _generate(self, request: Request, max_length: int) -> Generation:
        sampling, started = request.sampling, time.perf_counter()
        body = {
            "model": self.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": min(request.max_new_tokens, max_length - len(request.prompt_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or 1.0,
            "seed": request_seed(request),
            # A server fills what is missing from the model's generation_config.json.
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # Not in OpenAI's interface, but read by vLLM and SGLang:
            "top_k": sampling.top_k or -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(request.stop_ids),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        (choice,) = self._post("/v1/completions", body, "choices")
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise self._failure(
                "/v1/completions", f"the answer ended by {finish!r}", "see the server's log"
            )
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = self._tokens_of_text(choice)
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
        return self.tokenizer.encode(choice["text"], add_special_tokens=False)

    def _stop_token(self, choice: dict[str, Any], request: Request) -> int:
        """Return the stop token that the server left out: the one it names, or the end of sequence.

        Raises:
            UserError: neither is a stop token of the target.
        """
        for token in (choice.get("stop_reason"), self.tokenizer.eos_token_id):
            if token in request.stop_ids:
                return token
        raise self._failure(
            "/v1/completions",
            f"the answer ended at {choice.get('stop_reason')!r}, which is no stop token",
            "start the server without stop texts of its own",
        )

    def _served_model(self) -> str:
        """Return the id of the model to ask for: the named one, or the only one there is."""
        models = [model["id"] for model in self._post("/v1/models", None, "data")]
        name = self.settings.model
        if name is None and len(models) == 1:
            return models[0]
        if name not in models:
            raise UserError(
                f"expected the server to serve {name or 'one model'}, found {', '.join(models)}",
                where=self._url,
                do="name one of them: regenerate.server.model",
            )
        return name

    def _post(self, path: str, body: dict[str, Any] | None, field: str) -> Any:
        """Send a request (GET without a body) and return a field of its JSON answer.

        Refused and broken connections, time-outs, errors of the server (5xx) and "too many
        requests" (429) are repeated.
        """
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(API_KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        http_request = urllib.request.Request(self._url + path, data, headers)
        wait, attempts = FIRST_WAIT_S, self.settings.attempts
        for attempt in range(1, attempts + 1):
            try:
                with urllib.request.urlopen(
                    http_request, timeout=self.settings.timeout_s
                ) as answer:
                    return json.load(answer)[field]
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read(2000).decode(errors='replace')}"
                if error.code != 429 and error.code < 500:
                    raise self._failure(path, reason, "check regenerate.server") from None
            except (KeyError, TypeError) as error:
                reason = f"an answer without {field}: {error}"
            except (OSError, HTTPException, ValueError) as error:  # refused, broken off, not JSON
                reason = str(getattr(error, "reason", error) or type(error).__name__)
            if attempt == attempts or self._stopped.wait(wait):
                break
            wait = min(2 * wait, 60.0)
        do = "start the server, and repeat the command: finished answers are kept"
        raise self._failure(path, f"{reason} ({attempt} attempts)", do)

    def _failure(self, path: str, reason: str, do: str) -> UserError:
        return UserError(f"the server gave no answer: {reason}", where=f"{self._url}{path}", do=do)
