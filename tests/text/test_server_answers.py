"""Answers from a real HTTP server with OpenAI's completions interface, and its failures."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from draftlab.text import server_answers
from draftlab.text.conversations import read_conversations
from draftlab.text.settings import RegenerateSettings
from tests.helpers.small_run import draftlab, new_workshop, write_prompts

SAMPLED = ("regenerate.temperatures=[0.0]", "regenerate.batch=3")


class CompletionServer(ThreadingHTTPServer):
    """A server that decodes with the reference engine, and fails as it is told to.

    Args:
        target: folder of the target that it serves.

    Attributes:
        failures: one for each of the next requests: an HTTP status, "drop" (the connection
            is closed without an answer), "break" (in the middle of an answer) or "reset" (in the
            middle of the text of a failure).
        text_only: answers have no token ids.
        changes: fields of every choice that replace those of the answer.
        card: further fields of the served models.
        room: most tokens of a prompt and its answer; None: as many as the engine has. Larger
            requests are refused with HTTP 400 and `refusal`.
        hold: event for which answers wait; None: none.
        models: ids of the served models.
        requests: bodies of the completions asked for.
        most_at_once: largest number of completions in work at a time.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        settings = TargetSettings(path=str(target), device="cpu")
        self.engine = ReferenceEngine(load_target(settings), batch=1, max_length=512)
        self.tokenizer = load_tokenizer(settings)
        self.failures: list[int | str] = []
        self.text_only, self.models = False, ["the-target"]
        self.changes: dict[str, Any] = {}
        self.card: dict[str, Any] = {}
        self.room: int | None = None
        self.refusal: dict[str, Any] = {}
        self.hold: threading.Event | None = None
        self.requests: list[dict[str, Any]] = []
        self.in_work, self.most_at_once = 0, 0
        self.lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the choice of a completion."""
        # A server fills what a request lacks from the model's generation_config.json.
        plain = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "top_p": 1}
        plain |= {"presence_penalty": 0, "frequency_penalty": 0}
        assert {key: body.get(key) for key in plain} == plain
        stops = frozenset(body["stop_token_ids"])
        sampling = Sampling(body["temperature"], seed=body["seed"])
        ids = tuple(body["prompt"])
        request = Request("request", ids, body["max_tokens"], sampling, stops)
        with self.lock:
            (generation,) = self.engine.generate([request])
        tokens = list(generation.token_ids)
        stopped = generation.finish == "stop"
        text = self.tokenizer.decode(tokens[:-1] if stopped else tokens)
        choice = {"text": text, "finish_reason": generation.finish}
        return (choice if self.text_only else choice | {"token_ids": tokens}) | self.changes


class _Handler(BaseHTTPRequestHandler):
    server: CompletionServer

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        self._send(200, {"data": [{"id": model} | server.card for model in server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.in_work += 1
            server.most_at_once = max(server.most_at_once, server.in_work)
            failure = server.failures.pop(0) if server.failures else None
        if failure is None:
            server.requests.append(body)
            if server.hold is not None:
                server.hold.wait()
            if server.room is not None and len(body["prompt"]) + body["max_tokens"] > server.room:
                status, answer = 400, server.refusal
            else:
                status, answer = 200, {"choices": [server.complete(body)]}
        else:
            status, answer = failure, {"error": f"failure {failure}"}
        with server.lock:  # before the answer, upon which the next request comes
            server.in_work -= 1
        if status == "drop":
            self.close_connection = True
        elif status == "break":  # after the first bytes of an answer
            self.send_response(200)
            self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(b"{")
            self.close_connection = True
        elif status == "reset":
            self.send_response(503)
            self.send_header("Content-Length", "500")
            self.end_headers()
            self.wfile.write(b"busy")
            # Closing then sends a reset in place of the end.
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            time.sleep(0.1)  # a reset discards what the client has not read
            os.close(self.connection.detach())
        else:
            self._send(int(status), answer)

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serve(target: Path) -> Iterator[CompletionServer]:
    """Run a server in a thread."""
    server = CompletionServer(target)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(server_answers, "FIRST_WAIT_S", 0.01)
    return new_workshop(tmp_path)


def prepare(folder: Path, server: CompletionServer, *settings: str, code: int = 0) -> str:
    """Run `draftlab prepare` with the server; return what it printed."""
    url = f"regenerate.server.url=http://127.0.0.1:{server.server_port}/v1"
    arguments = ("prepare", "small.yaml", "regenerate.backend=openai", url, *SAMPLED, *settings)
    result = draftlab(folder, *arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def decoder(server: CompletionServer) -> server_answers.ServerAnswers:
    url = f"http://127.0.0.1:{server.server_port}"
    settings = RegenerateSettings.model_validate(
        {"backend": "openai", "batch": 2, "server": {"url": url, "attempts": 1}}
    )
    return server_answers.ServerAnswers(settings, server.tokenizer, Monitor())


def answer_tokens(folder: Path, name: str) -> list[tuple[int, ...]]:
    path = folder / "runs" / name / "answers.jsonl"
    return [a.token_ids for c in read_conversations(path) for a in c.answers]


def test_answers_of_a_server_are_the_engines(workshop: Path) -> None:
    """Also when requests fail at first, and when the server returns text only."""
    assert draftlab(workshop, "prepare", "small.yaml", "name=engine", *SAMPLED).exit_code == 0
    expected = answer_tokens(workshop, "engine")
    with serve(workshop / "toy") as server:
        server.failures = [503, "drop", 429, "break", "reset", 408, 500]
        output = prepare(workshop, server, "name=server")
        assert "the-target at http://127.0.0.1" in output
        assert output.count("requests are repeated: ") == 1, "not a line for each of them"
        assert len(server.requests) == len(expected) == 12
        assert 1 < server.most_at_once <= 3
        assert answer_tokens(workshop, "server") == expected
        server.text_only = True
        output = prepare(workshop, server, "name=text")
        assert "no token_ids" in output
        decoded = [server.tokenizer.decode(tokens).rstrip("\ufffd") for tokens in expected]
    texts = [server.tokenizer.decode(tokens) for tokens in answer_tokens(workshop, "text")]
    assert texts == decoded


def test_a_failing_server_ends_the_run_and_another_goes_on(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.failures = [500] * 40
        output = prepare(workshop, server, "regenerate.server.attempts=2", code=2)
        assert "HTTP 500" in output
        assert "(2 attempts)" in output
        assert "repeat the command" in output
        server.failures = []
        server.models = ["second"]
        output = prepare(workshop, server, code=2)
        assert "model" in output, "answers of two models do not mix"
        assert "second" in output
        server.models = ["the-target"]
        # Neither address nor attempts decide the answers, so the run goes on with another server.
        prepare(workshop, server, "regenerate.server.attempts=3")
        requests = len(server.requests)
        prepare(workshop, server)
        assert len(server.requests) == requests, "finished answers are kept"


def test_refusals(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.failures = [400]
        output = prepare(workshop, server, "regenerate.server.attempts=5", code=2)
        assert "HTTP 400" in output
        assert "/v1/completions, prompt 'p" in output
        assert "repeated" not in output
        server.models = ["one", "two"]
        output = prepare(workshop, server, code=2)
        assert "expected the server to serve one model, found one, two" in output
        output = prepare(workshop, server, "regenerate.server.model=three", "name=new", code=2)
        assert "expected the server to serve three, found one, two" in output
    output = prepare(workshop, server, "regenerate.server.attempts=1", code=2)
    assert "the server gave no answer" in output
    result = draftlab(workshop, "prepare", "small.yaml", "regenerate.backend=openai")
    assert result.exit_code == 2
    assert "server.url" in result.output


def test_the_stop_token_is_the_one_that_the_server_names(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        eos = server.tokenizer.eos_token_id
        request = Request("1", (5, 6), 4, Sampling(), frozenset({eos, 9}))

        def answer(**fields: Any) -> tuple[int, ...]:
            server.changes = {"finish_reason": "stop", "token_ids": [7], **fields}
            (generation,) = decoder(server)([request], 64)
            return generation.token_ids

        assert answer() == (7, eos)
        assert answer(token_ids=[7, 9]) == (7, 9)
        assert answer(stop_reason=9) == (7, 9), "vLLM"
        assert answer(matched_stop=9) == (7, 9), "SGLang"
        for reason in ({"stop_reason": "\n\n"}, {"matched_stop": "\n\n"}, {"stop_reason": 8}):
            with pytest.raises(UserError, match="no stop token"):
                answer(**reason)


def test_the_text_of_a_cut_answer_may_end_within_a_character(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.text_only = True
        server.changes = {"finish_reason": "length", "text": "return x\ufffd"}
        (generation,) = decoder(server)([Request("1", (5, 6), 4, Sampling(), frozenset({9}))], 64)
        expected = server.tokenizer.encode("return x", add_special_tokens=False)
        assert list(generation.token_ids) == expected


@pytest.mark.parametrize("choices", [[], [{"finish_reason": "stop"}]])
def test_an_answer_of_another_form_is_refused(
    workshop: Path, choices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(workshop / "toy") as server:
        decode = decoder(server)
        monkeypatch.setattr(decode, "_post", lambda *_: choices)
        with pytest.raises(UserError, match="expected one choice"):
            list(decode([Request("1", (5, 6), 4, Sampling(), frozenset({9}))], 64))


def test_prompts_that_are_too_long_for_the_server_are_left_out(workshop: Path) -> None:
    """Servers refuse requests beyond --max-model-len, which may be below the target's positions."""
    write_prompts(workshop / "prompts.jsonl", ["def f():" + " pass" * n for n in range(6)])
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=all")
        lengths = sorted(len(body["prompt"]) for body in server.requests)
        limit = lengths[len(lengths) // 2]
        server.requests, server.card = [], {"max_model_len": limit}
        output = prepare(workshop, server, "name=some")
        assert f"the server allows {limit} tokens" in output
        assert f"no room for an answer in {limit} positions" in output
        assert 0 < len(server.requests) == sum(length < limit for length in lengths)
        for body in server.requests:
            assert len(body["prompt"]) + body["max_tokens"] <= limit
        server.card = {"max_model_len": limit - 1}
        (workshop / "runs" / "some" / "stages" / "answers.json").unlink()
        assert "max_length" in prepare(workshop, server, "name=some", code=2)


def refusal(message: str, **fields: Any) -> dict[str, Any]:
    return {"error": {"message": message, "code": 400, **fields}}


VLLM = refusal("This model's maximum context length is 90 tokens. However, you requested 95 tokens")
TOO_LONG = {
    "vLLM": VLLM,
    "SGLang": {
        "object": "error",
        "message": "The input (95 tokens) is longer than the model's context length (90 tokens).",
    },
    "llama.cpp": refusal("request (95 tokens) is too large", type="exceed_context_size_error"),
    "OpenAI": refusal("Please reduce the length.", code="context_length_exceeded"),
}


def lengths_of_requests(server: CompletionServer) -> list[int]:
    return sorted(len(body["prompt"]) + body["max_tokens"] for body in server.requests)


@pytest.mark.parametrize("kind", TOO_LONG)
def test_prompts_that_the_server_refuses_as_too_long_are_left_out(
    workshop: Path, kind: str
) -> None:
    """Of a server that does not state how long a prompt and its answer may be."""
    write_prompts(workshop / "prompts.jsonl", ["def f():" + " pass" * n for n in range(6)])
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=all")
        room = lengths_of_requests(server)[3]
        expected = read_conversations(workshop / "runs/all/answers.jsonl")[:4]
        server.requests, server.room, server.refusal = [], room, TOO_LONG[kind]
        output = prepare(workshop, server, "name=some")
        assert len(server.requests) == 6
        assert "answers: dropped 2 prompts (first: p4): no room for the prompt" in output
        assert output.count("HTTP 400") == 1, "what the server says, once"
        assert read_conversations(workshop / "runs/some/answers.jsonl") == expected
        manifest = json.loads((workshop / "runs/some/answers.json").read_text())
        assert (manifest["conversations"], manifest["dropped"]) == (4, 2)
        assert "dropped_turns" not in manifest


def test_a_resumed_run_sends_no_prompt_again_that_was_too_long(workshop: Path) -> None:
    write_prompts(workshop / "prompts.jsonl", ["def f():" + " pass" * n for n in (9, 0, 8, 1, 2)])
    pieces = ("regenerate.piece=2", "regenerate.batch=1", "regenerate.server.attempts=1")
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=all", *pieces)
        server.room, server.refusal = lengths_of_requests(server)[2], VLLM
        prepare(workshop, server, "name=whole", *pieces)
        whole = (workshop / "runs/whole/answers.jsonl").read_bytes()
        server.requests = []
        complete = server.complete

        def fail_after_four(body: dict[str, Any]) -> dict[str, Any]:
            server.failures += [500] * (len(server.requests) == 4)  # the next one fails
            return complete(body)

        server.complete = fail_after_four  # type: ignore[method-assign]
        output = prepare(workshop, server, "name=some", *pieces, code=2)
        assert "HTTP 500" in output
        assert len(server.requests) == 4
        assert "dropped" not in output
        server.requests = []
        output = prepare(workshop, server, "name=some", *pieces)
        assert len(server.requests) == 1
        assert "resuming after 4 of 5" in output
        assert "dropped 2 prompts (first: p0): no room for the prompt" in output
        assert "left out" not in output.split("resuming")[1]
    assert (workshop / "runs/some/answers.jsonl").read_bytes() == whole


def test_later_turns_that_the_server_refuses_as_too_long_are_left_out(workshop: Path) -> None:
    turn = {"role": "user", "content": "def f():"}
    answer = {"role": "assistant", "content": "pass"}
    later = turn | {"content": "def f():" + " pass" * 9}
    lines = [[turn, answer, later, answer], [turn, answer]]
    (workshop / "prompts.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in lines)
    )
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=all")
        server.room, server.refusal = lengths_of_requests(server)[1], VLLM
        output = prepare(workshop, server, "name=some")
        assert "left out 1 later turns (first: prompts:1): no room for the prompt" in output
        assert "dropped" not in output
    assert [len(tokens) > 0 for tokens in answer_tokens(workshop, "some")] == [True, True]


def test_a_server_that_has_no_room_for_any_prompt(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.room, server.refusal = 1, VLLM
        output = prepare(workshop, server, code=2)
        assert "expected prompts the server can answer, found none: no room" in output
        server.requests = []
        assert "answers.partial.jsonl" in prepare(workshop, server, code=2)
        assert server.requests == []
        (workshop / "runs/small/answers.partial.jsonl").unlink()  # as the message says
        server.room = None
        prepare(workshop, server)


def test_other_refusals_end_the_run(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.room, server.refusal = 1, refusal("max_tokens must be even")
        output = prepare(workshop, server, code=2)
        assert "max_tokens must be even" in output
        assert "dropped" not in output


def test_leaving_the_answers_does_not_wait_for_the_server(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        stops = frozenset({9})
        requests = [Request(str(i), (5, 6), 4, Sampling(), stops) for i in range(6)]
        answers = decoder(server)(requests, 64)
        next(answers)
        server.hold = threading.Event()
        closing = threading.Thread(target=answers.close)
        closing.start()
        closing.join(30)
        left = not closing.is_alive()
        server.hold.set()
        while server.in_work:
            time.sleep(0.01)
        assert left
