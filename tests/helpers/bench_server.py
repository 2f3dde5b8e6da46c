"""A stand-in for a served vLLM, SGLang or llama.cpp: streams with drafts, counters, and faults."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.http_server import Handler, Server, running

K, ACCEPTED = 3, (2, 0, 3, 1)
"""Drafts a step, and accepted ones of a request's steps in turn."""


class BenchServer(Server):
    """Answers every prompt with as many tokens as it may have.

    Attributes:
        program: prefix of the metrics; "": no metrics.
        faults: one for each of the next completions: an HTTP status, or a kind of
            broken answer.
        others: requests of other users, one after each of ours.
        restart_at: number of requests after which the counters are 0 again.
        own: whether answers state their own counters, as vLLM can.
        drafts: whether the server drafts.
        longest: most tokens of its answers.
        usage_s: seconds between an answer's end and its usage.
        bodies, keys: of the completions asked for.
        cache_dtype: of the KV cache.
        template: token ids or text of /tokenize and /apply-template.
        card: further fields of the model.
    """

    def __init__(self, port: int = 0) -> None:
        super().__init__(_Handler, port)
        self.program, self.faults, self.others, self.restart_at = "vllm", [], 0, 0
        self.own, self.drafts, self.step_s, self.cache_dtype = False, True, 0.0, "auto"
        self.longest, self.usage_s = 1 << 30, 0.0
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.template: Any = None
        self.card: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.requests = self.tokens = self.steps = self.accepted = 0
        self.accepted_at = [0] * K

    def count(self, tokens: int, accepted: list[int]) -> None:
        with self.lock:
            self.requests += 1
            self.tokens += tokens
            self.steps += len(accepted)
            self.accepted += sum(accepted)
            for number in accepted:
                for position in range(number):
                    self.accepted_at[position] += 1
            if self.requests == self.restart_at:
                self.reset()

    def metrics(self) -> str:
        spec = {
            "spec_decode_num_drafts_total": self.steps,
            "spec_decode_num_draft_tokens_total": K * self.steps,
            "spec_decode_num_accepted_tokens_total": self.accepted,
        } | {
            f'spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}}': n
            for i, n in enumerate(self.accepted_at)
        }
        values = {
            "vllm": {
                'request_success_total{finished_reason="stop"}': 0,
                'request_success_total{finished_reason="length"}': self.requests,
                "generation_tokens_total": float(self.tokens),
                "num_requests_running": 0.0,
                f'cache_config_info{{block_size="128",cache_dtype="{self.cache_dtype}",x="1"}}': 1,
            }
            | (spec if self.drafts else {}),
            "sglang": {
                'num_requests_total{model_name="m"}': self.requests,
                "generation_tokens_total": self.tokens,
                "spec_verify_calls_total": self.steps,
            },
            "llamacpp": {"tokens_predicted_total": self.tokens} | spec,
            "": {},
        }[self.program]
        return "# HELP x\n" + "".join(f"{self.program}:{k} {v}\n" for k, v in values.items())


class _Handler(Handler):
    server: BenchServer

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/metrics":
            self.answer(200 if server.program else 404, server.metrics().encode())
        else:
            self.answer(200, {"data": [{"id": "m", **server.card}]})

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.body())
        if self.path != "/v1/completions":
            key = "prompt" if self.path == "/apply-template" else "tokens"
            found = server.template
            self.answer(404 if found is None else 200, {key: found})
            return
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers["Authorization"])
            fault = server.faults.pop(0) if server.faults else None
        if isinstance(fault, int):
            self.answer(fault, {"error": f"failure {fault}"})
            return
        self.send_response(200)
        self.end_headers()
        try:
            self._stream(body, fault)
        except OSError:  # the client has left
            return

    def _stream(self, body: dict[str, Any], fault: str | None) -> None:
        server, limit = self.server, min(body["max_tokens"], self.server.longest)
        tokens, accepted = 1, []
        self._event(text="a", token_ids=[1])
        while tokens < limit:
            time.sleep(server.step_s)
            number = ACCEPTED[len(accepted) % len(ACCEPTED)] if server.drafts else 0
            accepted.append(number)
            new = min(number + 1, limit - tokens)
            tokens += new
            if fault == "cut" and tokens > limit // 2:
                server.count(tokens, accepted)
                return
            ids = 7 if fault == "ids" else [1] * new
            text = 7 if fault == "type" else "x" * (1 << 21 if fault == "huge" else 1)
            self._event(text=text, token_ids=ids)
            if fault == "slow":
                time.sleep(5)
        server.count(tokens, accepted)
        for _ in range(server.others):
            server.count(limit, accepted)
        self._event(text="", finish_reason="length")
        time.sleep(server.usage_s)
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": tokens}}
        last["usage"]["prompt_tokens"] = len(body["prompt"])
        if fault == "count":
            last["usage"]["completion_tokens"] = str(tokens)
        if fault == "more":
            last["usage"]["completion_tokens"] = tokens + 1
        if server.own:
            spec = {"num_spec_steps": len(accepted), "num_draft_tokens": K * len(accepted)}
            spec["num_accepted_draft_tokens"] = sum(accepted)
            last["metrics"] = {"speculative_decoding": spec}
        self._data(json.dumps(last))
        self._data("[DONE]")

    def _event(self, **choice: Any) -> None:
        self._data(json.dumps({"choices": [{"index": 0, "finish_reason": None} | choice]}))

    def _data(self, text: str) -> None:
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()


@contextmanager
def bench_server(**attributes: Any) -> Iterator[BenchServer]:
    """Run a stand-in with these attributes during the block."""
    with running(BenchServer()) as server:
        vars(server).update(attributes)
        yield server


ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"""\
#!{sys.executable}
import os, signal, subprocess, sys, time
sys.path.insert(0, {str(ROOT)!r})
from tests.helpers.bench_server import BenchServer
fault = os.environ.get("STAND_IN_FAULT")
child = subprocess.Popen(["sleep", "600"])
print(f"pids {{os.getpid()}} {{child.pid}}", flush=True)
if fault == "die":
    print("ValueError: no such layer", flush=True)
    sys.exit(3)
if fault == "deaf":  # to SIGTERM, as a server that hangs
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(1)  # it loads
BenchServer(int(sys.argv[sys.argv.index("--port") + 1])).serve_forever()
"""


def write_program(path: Path) -> Path:
    """Write the stand-in with a child process as a program that takes a server's options."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path
