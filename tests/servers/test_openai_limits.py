"""Prompts that are too long for a server of answers are left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftlab.servers.repeated_requests import TOO_LONG as TOO_LONG_PATTERN
from tests.helpers.completion_server import CompletionServer, answer_tokens, prepare, serve
from tests.helpers.messages import read_conversations
from tests.helpers.small_run import write_prompts


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
def test_messages_of_prompts_that_are_too_long_are_known(kind: str) -> None:
    assert TOO_LONG_PATTERN.search(json.dumps(TOO_LONG[kind]))


def test_prompts_that_the_server_refuses_as_too_long_are_left_out(workshop: Path) -> None:
    """A server may not state how long a prompt and its answer may be."""
    write_prompts(workshop / "prompts.jsonl", ["def f():" + " pass" * n for n in range(6)])
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=all")
        room = lengths_of_requests(server)[3]
        expected = read_conversations(workshop / "runs/all/answers.jsonl")[:4]
        server.requests, server.room, server.refusal = [], room, TOO_LONG["SGLang"]
        output = prepare(workshop, server, "name=some")
        assert len(server.requests) == 6
        assert "answers: dropped 2 prompts (first: p4): no room for the prompt" in output
        assert output.count("HTTP 400") == 1, "what the server says, once"
        assert read_conversations(workshop / "runs/some/answers.jsonl") == expected
        manifest = json.loads((workshop / "runs/some/answers.json").read_text())
        assert (manifest["conversations"], manifest["dropped"]) == (4, 2)
        assert "dropped_turns" not in manifest


@pytest.mark.parametrize(
    ("refusal", "status", "words"),
    [(VLLM, 500, "HTTP 500"), (refusal("max_tokens must be even"), 400, "max_tokens must be even")],
)
def test_other_failures_end_the_run(
    workshop: Path, refusal: dict[str, Any], status: int, words: str
) -> None:
    """Only HTTP 400 refuses a request; a prompt that met another failure is not left out."""
    with serve(workshop / "toy") as server:
        server.room, server.refusal, server.refusal_status = 0, refusal, status
        output = prepare(workshop, server, "regenerate.server.attempts=1", code=2)
        assert words in output
        assert "dropped" not in output


def test_a_resumed_run_sends_no_prompt_again_that_was_too_long(workshop: Path) -> None:
    write_prompts(workshop / "prompts.jsonl", ["def f():" + " pass" * n for n in (9, 0, 8, 1, 2)])
    pieces = ("regenerate.piece=2", "regenerate.batch=1", "regenerate.server.attempts=1")
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=all", *pieces)
        server.room, server.refusal = lengths_of_requests(server)[2], VLLM
        prepare(workshop, server, "name=whole", *pieces)
        whole = (workshop / "runs/whole/answers.jsonl").read_bytes()
        server.requests = []

        class AfterFour(list[int | str]):
            """Fails requests once four were answered or refused."""

            def __bool__(self) -> bool:
                return len(server.requests) == 4

            def pop(self, *_: object) -> int:
                return 500

        server.failures = AfterFour()
        output = prepare(workshop, server, "name=some", *pieces, code=2)
        assert "HTTP 500" in output
        assert len(server.requests) == 4
        assert "dropped" not in output
        server.requests, server.failures = [], []
        output = prepare(workshop, server, "name=some", *pieces)
        # Two threads wait to send the last two prompts: either's request may be the fourth.
        kept = 4 if "resuming after 4 of 5" in output else 3
        assert f"resuming after {kept} of 5" in output
        assert len(server.requests) == 5 - kept
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
        assert "left out 1 later turn (first: prompts:1): no room for the prompt" in output
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
