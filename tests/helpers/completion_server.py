"""An HTTP server with OpenAI's completions interface, and runs that take answers from it."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from draftlab.engine.reference import ReferenceEngine
from draftlab.engine.sampling import Request, Sampling
from draftlab.target_model.loading import load_target, load_tokenizer
from draftlab.target_model.settings import TargetSettings
from tests.helpers.http_server import Handler, Server, running
from tests.helpers.messages import read_conversations
from tests.helpers.small_run import draftlab

SAMPLED = ("regenerate.temperatures=[0.0]", "regenerate.batch=3")


class CompletionServer(Server):
    """A server that decodes with the reference engine, and fails as it is told to.

    Args:
        target: folder of the target that it serves.

    Attributes:
        failures: one for each of the next requests: an HTTP status, "drop" (the connection
            is closed without an answer), "break" (in the middle of an answer) or "reset" (in the
            middle of the text of a failure).
        text_only: answers have no token ids; "logprobs": they have those of llama.cpp.
        further: prompt tokens that the server adds.
        changes: fields of every choice that replace those of the answer.
        card: further fields of the served models.
        room: most tokens of a prompt and its answer; None: as many as the engine has. Larger
            requests are refused with `refusal_status` and `refusal`.
        hold: event for which answers wait; None: none.
        models: ids of the served models.
        template: text of /apply-template; None: the server does not show it.
        requests: bodies of the completions asked for.
        most_at_once: largest number of completions in work at a time.
    """

    def __init__(self, target: Path) -> None:
        super().__init__(_Handler)
        settings = TargetSettings(path=str(target), device="cpu")
        self.engine = ReferenceEngine(load_target(settings), batch=1, max_length=512)
        self.tokenizer = load_tokenizer(settings)
        self.failures: list[int | str] = []
        self.text_only: bool | str = False
        self.models, self.template = ["the-target"], None
        self.changes: dict[str, Any] = {}
        self.further = 0
        self.card: dict[str, Any] = {}
        self.room: int | None = None
        self.refusal: dict[str, Any] = {}
        self.refusal_status = 400
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
        if self.text_only == "logprobs" and body["n_probs"]:
            choice["logprobs"] = {"content": [{"id": token} for token in tokens]}
        return (choice if self.text_only else choice | {"token_ids": tokens}) | self.changes


class _Handler(Handler):
    server: CompletionServer

    def do_GET(self) -> None:
        server = self.server
        self.answer(200, {"data": [{"id": model} | server.card for model in server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.body())
        server = self.server
        if self.path != "/v1/completions":
            found = self.path == "/apply-template" and server.template
            self.answer(200 if found else 404, {"prompt": found})
            return
        with server.lock:
            server.in_work += 1
            server.most_at_once = max(server.most_at_once, server.in_work)
            failure = server.failures.pop(0) if server.failures else None
        if failure is None:
            server.requests.append(body)
            if server.hold is not None:
                server.hold.wait()
            if server.room is not None and len(body["prompt"]) + body["max_tokens"] > server.room:
                status, answer = server.refusal_status, server.refusal
            else:
                status, answer = 200, {"choices": [server.complete(body)]}
                answer["usage"] = {"prompt_tokens": len(body["prompt"]) + server.further}
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
            self.answer(int(status), answer)


def serve(target: Path) -> AbstractContextManager[CompletionServer]:
    """Run a server during a block."""
    return running(CompletionServer(target))


def prepare(
    folder: Path,
    server: CompletionServer,
    *settings: str,
    others: Sequence[CompletionServer] = (),
    code: int = 0,
) -> str:
    """Run `draftlab prepare` with the server, and with others; return what it printed."""
    url = "regenerate.server.url=" + ",".join(f"{one.url}/v1" for one in (server, *others))
    arguments = ("prepare", "small.yaml", "regenerate.backend=openai", url, *SAMPLED, *settings)
    result = draftlab(folder, *arguments)
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def answer_tokens(folder: Path, name: str) -> list[tuple[int, ...]]:
    """Return the token ids of all answers of a run."""
    path = folder / "runs" / name / "answers.jsonl"
    return [a.token_ids for c in read_conversations(path) for a in c.answers]
