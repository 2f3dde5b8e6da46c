"""What an answer server may get and may send: keys, redirects, and answers that are none."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.servers import connection
from draftlab.servers.connection import API_KEY, BASE_URL, answer_fault, key_for
from draftlab.servers.openai_answers import ServerAnswers
from draftlab.servers.settings import RegenerateSettings
from draftlab.target_model.loading import load_tokenizer
from draftlab.target_model.settings import TargetSettings
from tests.helpers.http_server import Handler, Server, running
from tests.helpers.monitors import RecordingMonitor

KEY = "sk-hunter2"
VOCAB_SIZE, STOP = 6_144, 9
CHOICE = {"finish_reason": "length", "token_ids": [5, 6], "text": "a b"}
CARD = {"id": "the-target"}
REQUEST = Request("p1", (5, 6), 4, Sampling(), frozenset({STOP}))


class StubServer(Server):
    """A server that sends what it is told to, and keeps the headers of all requests.

    Attributes:
        answers: path → the JSON of its answer, or bytes.
        redirect: where requests of completions are sent to; "": nowhere.
        timeout_s: seconds that `ask` waits for an answer.
        drip: the beginning of an answer to completions that never ends; b"": none.
        drip_s: seconds after which nothing more of it comes.
        refusal: an HTTP status with which completions are refused, and whose text repeats the key.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.answers: dict[str, Any] = {
            "/v1/models": {"data": [CARD]},
            "/v1/completions": {"choices": [CHOICE]},
        }
        self.redirect, self.refusal, self.drip = "", 0, b""
        self.timeout_s, self.drip_s = 600.0, float("inf")
        self.keys: list[str | None] = []


class _Handler(Handler):
    server: StubServer

    def do_any(self) -> None:
        server, key = self.server, self.headers.get("Authorization")
        self.body()
        server.keys.append(key)
        status, content, headers = 200, server.answers[self.path], {}
        if self.path == "/v1/completions" and server.drip:
            with contextlib.suppress(OSError):  # the client leaves
                self.wfile.write(server.drip)
                begin = time.monotonic()
                while time.monotonic() - begin < server.drip_s:
                    self.wfile.write(b" ")
                    time.sleep(0.05)
                time.sleep(4)
        if self.path == "/v1/completions" and (server.redirect or server.refusal):
            status = 307 if server.redirect else server.refusal
            headers = {"Location": server.redirect} if server.redirect else {}
            content = f"no such key: {key}".encode()
        self.answer(status, content, **headers)

    do_GET = do_POST = do_any


@pytest.fixture
def server() -> Iterator[StubServer]:
    with running(StubServer()) as one:
        yield one


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TargetSettings())


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BASE_URL, raising=False)
    monkeypatch.delenv(API_KEY, raising=False)


def ask(server: StubServer, tokenizer: Any, monitor: RecordingMonitor | None = None) -> Any:
    """Return the answer to `REQUEST`."""
    settings = RegenerateSettings.model_validate(
        {
            "backend": "openai",
            "server": {"url": server.url, "attempts": 1, "timeout_s": server.timeout_s},
        }
    )
    decode = ServerAnswers(settings, tokenizer, monitor or RecordingMonitor(), VOCAB_SIZE)
    return decode.generate(REQUEST, 64, threading.Event())


# Keys


@pytest.mark.parametrize(
    ("url", "base_url", "sent"),
    [
        ("http://localhost:8000", "", True),
        ("http://127.0.0.2:8000/v1", "", True),
        ("http://[::1]:8000", "", True),
        ("https://api.openai.com/v1", "", True),
        ("https://API.openai.com:443", "", True),
        ("http://api.openai.com/v1", "", False),
        ("https://api.openai.com.evil.org", "", False),
        ("https://api.openai.com:8443", "", False),
        ("https://evil.org/api.openai.com", "", False),
        ("http://localhost.evil.org", "", False),
        ("http://127.0.0.1.evil.org", "", False),
        ("http://10.0.0.3:8000", "", False),
        ("http://10.0.0.3:8000", "http://10.0.0.3:8000/v1", True),
        ("http://10.0.0.3:8001", "http://10.0.0.3:8000/v1", False),
        ("http://10.0.0.3:8000", "https://10.0.0.3:8000/v1", False),
        ("http://10.0.0.4:8000", "http://10.0.0.3:8000/v1", False),
        ("http://10.0.0.3:99999", "", False),
    ],
)
def test_who_gets_the_key(
    url: str, base_url: str, sent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert key_for(url) is None
    monkeypatch.setenv(API_KEY, KEY)
    monkeypatch.setenv(BASE_URL, base_url)
    assert key_for(url) == (KEY if sent else None)


def test_a_server_that_only_the_recipe_names_gets_no_key(
    server: StubServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_is_loopback", lambda host: False)
    monkeypatch.setenv(API_KEY, KEY)
    with running(StubServer()) as users:
        monkeypatch.setenv(BASE_URL, f"{users.url}/v1")
        monitor = RecordingMonitor()
        ask(server, tokenizer, monitor)
        assert server.keys == [None, None]
        assert any(f"{API_KEY} is not sent to {server.url}" in line for line in monitor.lines)
        assert not any(KEY in line for line in monitor.lines)
        monitor = RecordingMonitor()
        ask(users, tokenizer, monitor)
        assert users.keys == [f"Bearer {KEY}"] * 2
        assert not any("not sent" in line for line in monitor.lines)


def test_no_redirect_is_followed(
    server: StubServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, KEY)
    with running(StubServer()) as other:
        server.redirect = f"{other.url}/v1/completions?token=abc"
        with pytest.raises(UserError, match="HTTP 307: it redirects to") as caught:
            ask(server, tokenizer)
        assert other.keys == [], "neither key nor prompt leaves the named server"
        assert other.url in caught.value.what
        assert "abc" not in caught.value.what
        server.redirect = f"{server.url}/v1/completions"
        with pytest.raises(UserError, match="HTTP 307"):
            ask(server, tokenizer)


def test_a_refusal_that_repeats_the_key(
    server: StubServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, KEY)
    for server.refusal in (401, 500):
        with pytest.raises(UserError, match=f"HTTP {server.refusal}: no such key") as caught:
            ask(server, tokenizer)
        assert KEY not in str(caught.value)
    server.refusal = 0
    server.answers["/v1/completions"] = {"choices": [CHOICE | {"finish_reason": KEY}]}
    with pytest.raises(UserError, match=r"the answer ended by '\(hidden\)'"):
        ask(server, tokenizer)
    server.redirect = f"{server.url}/{KEY}"
    with pytest.raises(UserError, match=r"redirects to http://127\.0\.0\.1:\d+/\(hidden\)"):
        ask(server, tokenizer)


# Answers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [-3]}, r"from 0 to 6,143, found -3 at position 0"),
        ({"token_ids": [5, 1.5]}, r"found 1\.5 at position 1"),
        ({"token_ids": [True]}, "found True"),
        ({"token_ids": [VOCAB_SIZE]}, "found 6144"),
        ({"token_ids": [5] * 5}, "expected at most 4 tokens, found 5"),
        ({"token_ids": {"0": 5}}, "expected a list of token ids"),
        ({"token_ids": None, "text": None}, "expected one choice with token_ids or text"),
        ({"token_ids": None, "text": 7}, "expected one choice with token_ids or text"),
        ({"token_ids": None, "text": "a b " * 1_000}, "expected at most 24 tokens, found [12],"),
        ({"token_ids": None, "text": "a b " * 4_000}, "at most 24 tokens, found a text of 16,000"),
        ({"finish_reason": None}, "the answer ended by None"),
        ({"finish_reason": "content_filter"}, "the answer ended by 'content_filter'"),
        ({"finish_reason": "stop", "stop_reason": float(STOP)}, r"ended at 9\.0"),
        ({"finish_reason": "stop", "stop_reason": [STOP]}, r"ended at \[9\]"),
    ],
)
def test_a_choice_that_is_none(
    changes: dict[str, Any], message: str, server: StubServer, tokenizer: Any
) -> None:
    server.answers["/v1/completions"] = {"choices": [CHOICE | changes]}
    with pytest.raises(UserError, match=message) as caught:
        ask(server, tokenizer)
    assert caught.value.where == f"{server.url}/v1/completions, prompt 'p1'"
    assert len(caught.value.what) < 500


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/v1/completions", {"choices": [CHOICE, CHOICE]}, "expected one choice"),
        ("/v1/completions", {"choices": {"0": CHOICE}}, "expected one choice"),
        ("/v1/completions", {"choices": [7]}, "expected one choice"),
        ("/v1/completions", [CHOICE], "an answer without choices"),
        ("/v1/completions", b"[" * 100_000, "brackets within each other"),
        ("/v1/completions", b"[" + b"[]," * 400_000, "more than 1,050,976 bytes"),
        ("/v1/models", b" " * (1 << 20) + b"{}", "more than 1,048,576 bytes"),
        ("/v1/completions", b"<html>", "Expecting value"),
        ("/v1/models", {"data": [{"id": 7}]}, "expected a list of models"),
        ("/v1/models", {"data": "the-target"}, "expected a list of models"),
        ("/v1/models", {"data": [CARD | {"max_model_len": "64"}]}, "expected max_model_len"),
        ("/v1/models", {"data": [CARD | {"max_model_len": -1}]}, "expected max_model_len"),
    ],
)
def test_another_form_of_answer(
    path: str, answer: Any, message: str, server: StubServer, tokenizer: Any
) -> None:
    server.answers[path] = answer
    with pytest.raises(UserError, match=message) as caught:
        ask(server, tokenizer)
    assert server.url in caught.value.where


@pytest.mark.parametrize("part", ["body", "headers", "a chunked body", "a failure"])
def test_an_answer_that_drips_is_left(part: str, server: StubServer, tokenizer: Any) -> None:
    """Each byte comes in time, and the answer never ends."""
    server.timeout_s = 0.5
    start = {
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n",
        "headers": b"HTTP/1.1 200 OK\r\nX: ",
        "a chunked body": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffff\r\n",
        "a failure": b"HTTP/1.1 500 Error\r\nContent-Length: 900000\r\n\r\n",
    }
    server.drip = start[part]
    before = time.monotonic()
    with pytest.raises(UserError, match="timed out"):
        ask(server, tokenizer)
    assert time.monotonic() - before < 5


def test_the_last_read_of_an_answer_has_the_time_that_is_left(
    server: StubServer, tokenizer: Any
) -> None:
    server.timeout_s, server.drip_s = 2.0, 1.5
    server.drip = b"HTTP/1.1 200 OK\r\nContent-Length: 900000\r\n\r\n"
    before = time.monotonic()
    with pytest.raises(UserError, match="timed out"):
        ask(server, tokenizer)
    assert time.monotonic() - before < 3


def test_a_server_on_this_machine_is_reached_without_a_proxy(
    server: StubServer, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would get the key in clear text."""
    monkeypatch.setenv(API_KEY, KEY)
    monkeypatch.delenv("no_proxy", raising=False)
    with running(StubServer()) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        ask(server, tokenizer)
        assert (server.keys, proxy.keys) == ([f"Bearer {KEY}"] * 2, [])
        monkeypatch.setattr(connection, "_is_loopback", lambda host: False)
        proxy.answers = {server.url + path: answer for path, answer in server.answers.items()}
        ask(server, tokenizer)
        assert (len(server.keys), proxy.keys) == (2, [None, None])


def test_an_answer_may_fill_what_was_asked_for() -> None:
    assert answer_fault([VOCAB_SIZE - 1, 0, 5, STOP], VOCAB_SIZE, 4) == ""
    assert answer_fault([], VOCAB_SIZE, 4) == ""
