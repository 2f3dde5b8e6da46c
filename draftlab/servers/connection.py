"""How a server is reached: who gets the user's key, no redirects, answers checked and bounded.

A server on this machine is reached without a proxy, which would read the key.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse
from io import BufferedReader, RawIOBase
from queue import SimpleQueue
from threading import Event, Thread
from typing import IO, Any, TypeVar
from urllib.parse import urlsplit

from draftlab.errors import UserError
from draftlab.files import parse_json
from draftlab.url_secrets import HIDDEN

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the key that is sent to a server of `key_for`, if it is set."""
BASE_URL = "OPENAI_BASE_URL"
"""Environment variable with the address of the server that the key is for, as OpenAI's clients read
it."""


MAX_TEXT = 200
"""Characters of an answer that a message quotes."""
FREE_BYTES, CALL_S = 1 << 20, 10.0
"""Most bytes of an answer without tokens, and seconds of a request that decodes nothing."""
REACH_S = 30.0
"""Seconds for which a host may be silent, as one that has vanished; a live one acknowledges probes
while it decodes."""
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""When the kernel asks whether the other host is there (s), and how often. TCP_USER_TIMEOUT would
also end a long request that a busy server does not read yet."""
Job, Result = TypeVar("Job"), TypeVar("Result")


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would take prompts and key to an address that nobody named."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _UntilDeadline(RawIOBase):
    """Reads a socket until its timeout has passed in all, which Python counts for each read."""

    def __init__(self, raw: RawIOBase, socket: Any) -> None:
        self._raw, self._socket = raw, socket
        self._end = time.monotonic() + socket.gettimeout()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(left)
        return self._raw.readinto(buffer)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = BufferedReader(_UntilDeadline(self.fp.detach(), sock))


class _Timed(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Has the timeout of a request hold for its whole answer: headers and body."""

    def do_open(self, http_class: Any, *args: Any, **kwargs: Any) -> Any:
        def connect(*args: Any, **kwargs: Any) -> HTTPConnection:
            connection: HTTPConnection = http_class(*args, **kwargs)
            connection.response_class = _Answer
            connection._create_connection = _reach  # type: ignore[attr-defined]
            return connection

        return super().do_open(connect, *args, **kwargs)


def _reach(address: tuple[str, int], timeout: float, source: Any = None) -> socket.socket:
    """Connect as `socket.create_connection`; a host that vanishes is noticed within `REACH_S`."""
    reached = socket.create_connection(address, min(timeout, REACH_S), source)
    reached.settimeout(timeout)
    reached.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if option := getattr(socket, name, None):  # not on macOS
            reached.setsockopt(socket.IPPROTO_TCP, option, value)
    return reached


def opener_for(url: str) -> urllib.request.OpenerDirector:
    """Return what opens the requests to a server; the user's proxies serve for other machines."""
    proxies = urllib.request.ProxyHandler({} if is_here(url) else None)
    return urllib.request.build_opener(proxies, _NoRedirects, _Timed)


def is_here(url: str) -> bool:
    """Return whether a URL is of this machine."""
    origin = _origin(url)
    return origin is not None and _is_loopback(origin[1])


def key_for(url: str) -> str | None:
    """Return the user's key if a server may have it; else None.

    The address comes from a recipe, which may be a stranger's. So the key is sent to this machine,
    to OpenAI over HTTPS and to the server that the user's own environment names in `BASE_URL`.
    """
    origin = _origin(url)
    own = {("https", "api.openai.com", 443), _origin(os.environ.get(BASE_URL, ""))} - {None}
    if origin is None or not (origin in own or _is_loopback(origin[1])):
        return None
    return os.environ.get(API_KEY)


class Connection:
    """The address of a server, and requests to it.

    Args:
        url: the server's address, with or without /v1.

    Attributes:
        key_note: says that this server does not get the user's key; "": there is none to keep.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key, self._opener = key_for(self.url), opener_for(self.url)
        self.key_note = ""
        if self._key is None and os.environ.get(API_KEY):
            self.key_note = (
                f"{API_KEY} is not sent to {self.url}; if it is this server's key, set "
                f"{BASE_URL}={self.url}"
            )

    def open(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Send a request (GET without a body) and return the answer, to be read and closed.

        Raises:
            OSError, HTTPException: as `urllib.request.urlopen`.
        """
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        return self._opener.open(request, timeout=timeout_s)

    def ask(self, path: str, body: Any = None) -> tuple[Any, str]:
        """Return the JSON of a request that decodes nothing, and why there is none: None, a reason.

        Its answer has at most `FREE_BYTES` and 10 seconds.
        """
        try:
            with self.open(path, body, timeout_s=CALL_S) as answer:
                return read_json(answer, FREE_BYTES), ""
        except (OSError, HTTPException, ValueError) as error:
            return None, self.reason(error)

    def template(self, model: str, message: str) -> str | list[int] | None:
        """Return a user's message in the server's chat template; None: it does not show it.

        Returns:
            The text (llama.cpp), or token ids (vLLM).
        """
        body = {"messages": [{"role": "user", "content": message}], "model": model}
        body["add_generation_prompt"] = True
        for path, key in (("/apply-template", "prompt"), ("/tokenize", "tokens")):
            answer, _ = self.ask(path, body)
            found = answer.get(key) if isinstance(answer, dict) else None
            if found and isinstance(found, str | list):
                return found
        return None

    def reason(self, error: Exception) -> str:
        """Return a short reason for a failure of a request, without the key."""
        if isinstance(error, urllib.error.HTTPError):
            place = error.headers.get("Location")
            text = f"it redirects to {place}, where nothing was sent" if place else ""
            reason = f"HTTP {error.code}: {text or error_text(error)}"
        elif isinstance(getattr(error, "reason", error), TimeoutError):
            reason = "no end of an answer in time"
        else:
            reason = str(getattr(error, "reason", error) or type(error).__name__)
        return " ".join(self.without_key(reason).split())[:MAX_TEXT]

    def without_key(self, text: str) -> str:
        """Return what the server says without the key, which it may repeat."""
        return text.replace(self._key, HIDDEN) if self._key else text


def served_card(answer: Any, name: str | None, *, where: str, do: str) -> dict[str, Any] | None:
    """Return what a server says of the named model, or of the only one that it serves.

    Args:
        answer: its JSON to /v1/models.
        do: how the user names one of them.

    Returns:
        The card, whose `id` is a text; None: the answer has no list of cards.

    Raises:
        UserError: it does not serve the named model, or it serves several and none is named.
    """
    models = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(models, list) or not all(
        isinstance(card, dict) and isinstance(card.get("id"), str) for card in models
    ):
        return None
    cards: dict[str, dict[str, Any]] = {card["id"]: card for card in models}
    if name is None and len(cards) == 1:
        (name,) = cards
    if name not in cards:
        raise UserError(
            f"expected the server to serve {name or 'one model'}, found {', '.join(cards)}",
            where=where,
            do=do,
        )
    return cards[name]


def error_text(answer: urllib.error.HTTPError) -> str:
    """Return the beginning of a failure's text, or why it cannot be read."""
    try:
        with answer:
            return answer.read(2000).decode(errors="replace")
    except (OSError, HTTPException) as error:  # its connection can break off too
        return str(error) or type(error).__name__


def _origin(url: str) -> tuple[str, str, int] | None:
    """Return scheme, host and port of a URL; None: it has none."""
    try:
        parts = urlsplit(url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (ValueError, KeyError):
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_token_id(value: Any, vocab_size: int) -> bool:
    """Return whether a JSON value is a token id: a whole number of the vocabulary."""
    return type(value) is int and 0 <= value < vocab_size


def answer_fault(tokens: Any, vocab_size: int, max_tokens: int) -> str:
    """Return "expected …, found …" for token ids that are no answer; "": they are.

    Args:
        tokens: what the program sent.
        vocab_size: rows of the target's embedding.
        max_tokens: most tokens that the program was asked for.
    """
    if not isinstance(tokens, list):
        return f"expected a list of token ids, found {repr(tokens)[:MAX_TEXT]}"
    for position, token in enumerate(tokens):
        if not is_token_id(token, vocab_size):
            return (
                f"expected token ids from 0 to {vocab_size - 1:,}, found "
                f"{repr(token)[:MAX_TEXT]} at position {position:,}"
            )
    if len(tokens) > max_tokens:
        return f"expected at most {max_tokens:,} tokens, found {len(tokens):,}"
    return ""


def read_json(answer: IO[bytes], max_bytes: int) -> Any:
    """Return the JSON of an answer.

    Raises:
        ValueError: it is none, is longer than `max_bytes` or is nested too deep.
    """
    content = answer.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"an answer of more than {max_bytes:,} bytes")
    return parse_json(content)


@contextmanager
def in_threads(
    work: Callable[[Job, Event], Result], at_once: int
) -> Iterator[Callable[[Job], Future[Result]]]:
    """Yield a function that has a job done in a thread; at the end jobs that wait are left.

    Nobody waits for daemon threads: an interrupted command does not wait for long answers.

    Args:
        work: gets a job, and an event that is set at the end.
    """
    stopped, waiting = Event(), SimpleQueue[tuple[Job, Future[Result]] | None]()
    threads = list[Thread]()

    def run() -> None:
        while (taken := waiting.get()) and not stopped.is_set():
            job, future = taken
            try:
                future.set_result(work(job, stopped))
            except BaseException as error:
                future.set_exception(error)
            del taken, job, future  # what it returns is kept by whoever waits for it

    def submit(job: Job) -> Future[Result]:
        future = Future[Result]()
        waiting.put((job, future))
        if len(threads) < at_once:
            threads.append(Thread(target=run, daemon=True))
            threads[-1].start()
        return future

    try:
        yield submit
    finally:
        stopped.set()
        for _ in threads:
            waiting.put(None)
