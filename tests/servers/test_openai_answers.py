"""Answers from a real HTTP server with OpenAI's completions interface, and its failures."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.errors import UserError
from draftlab.progress import Monitor
from draftlab.servers import openai_answers
from draftlab.servers.settings import RegenerateSettings
from draftlab.text import answers
from draftlab.text.answer_rounds import AnswerGenerator, Draft
from draftlab.text.conversations import Conversation
from tests.helpers.completion_server import SAMPLED, CompletionServer, answer_tokens, prepare, serve
from tests.helpers.small_run import draftlab, ran

VOCAB_SIZE = 289


def decoder(server: CompletionServer) -> openai_answers.ServerAnswers:
    settings = RegenerateSettings.model_validate(
        {"backend": "openai", "batch": 2, "server": {"url": server.url, "attempts": 1}}
    )
    return openai_answers.ServerAnswers(settings, server.tokenizer, Monitor(), VOCAB_SIZE)


def test_answers_of_a_server_are_the_engines(workshop: Path) -> None:
    """Also when requests fail at first, and when the server has the ids elsewhere, or text only."""
    assert draftlab(workshop, "prepare", "small.yaml", "name=engine", *SAMPLED).exit_code == 0
    expected = answer_tokens(workshop, "engine")
    with serve(workshop / "toy") as server:
        server.failures = [503, "drop", 429, "break", "reset", 408, 500]
        output = prepare(workshop, server, "name=server")
        assert "the-target at http://127.0.0.1" in output
        assert output.count("requests are repeated: ") == 1, "not a line for each of them"
        assert len(server.requests) == len(expected) == 12
        assert len({body["seed"] for body in server.requests}) == 12
        assert 1 < server.most_at_once <= 3
        assert answer_tokens(workshop, "server") == expected
        server.text_only = "logprobs"
        assert "no token_ids" not in prepare(workshop, server, "name=logprobs")
        assert answer_tokens(workshop, "logprobs") == expected
        server.text_only = True
        output = prepare(workshop, server, "name=text")
        assert "no token_ids" in output
        decoded = [server.tokenizer.decode(tokens).rstrip("\ufffd") for tokens in expected]
    texts = [server.tokenizer.decode(tokens) for tokens in answer_tokens(workshop, "text")]
    assert texts == decoded


def test_several_servers_share_the_requests(workshop: Path) -> None:
    """The answers are those of one; a server that fails is left, and its requests are repeated."""
    with serve(workshop / "toy") as first, serve(workshop / "toy") as second:
        prepare(workshop, first, "name=one")
        expected = (workshop / "runs/one/answers.jsonl").read_bytes()
        first.requests = []
        prepare(workshop, first, "name=two", others=[second])
        assert (workshop / "runs/two/answers.jsonl").read_bytes() == expected
        assert len(first.requests) + len(second.requests) == 12
        assert min(len(first.requests), len(second.requests)) > 2
        first.requests = []
        second.failures = ["drop"] * 12
        output = prepare(workshop, first, "name=lame", others=[second])
        assert "requests are repeated: " in output
        assert len(first.requests) == 12
        assert len(second.failures) > 8, "it is not asked again and again"
        assert (workshop / "runs/lame/answers.jsonl").read_bytes() == expected
        first.card = {"max_model_len": 200}
        second.card = {"max_model_len": 150}
        assert "allows 150 tokens" in prepare(workshop, first, "name=room", others=[second])
        second.models = ["other"]
        output = prepare(workshop, first, others=[second], code=2)
        assert "expected the-target, as the first one serves, found other" in output


def test_conversations_are_answered_at_once_and_kept_one_by_one(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        prepare(workshop, server, "name=whole")
        server.most_at_once, server.requests = 0, []
        complete = server.complete

        def fail_the_last(body: dict[str, Any]) -> dict[str, Any]:
            server.failures += [400] * (len(server.requests) == 11)  # of 12 ends the run
            return complete(body)

        server.complete = fail_the_last  # type: ignore[method-assign]
        prepare(workshop, server, "name=single", code=2)
        assert 1 < server.most_at_once <= 3
        asked = len(server.requests)
        output = prepare(workshop, server, "name=single")
        assert "resuming after" in output
        assert len(server.requests) - asked < 6, "at most those under way, of one piece"
    expected = answer_tokens(workshop, "whole")
    assert answer_tokens(workshop, "single") == expected


def test_a_server_that_reads_other_prompts_is_named(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.template = "### user"
        output = prepare(workshop, server, "name=other")
        assert f"the chat template of {server.url} differs" in output
        server.template, server.further = None, 1
        output = prepare(workshop, server, code=2)
        assert "the server read others: it cuts prompts, or adds tokens" in output
        server.changes = {"prompt_token_ids": [5]}
        assert "the server read others" in prepare(workshop, server, code=2)


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
    result = ran(workshop, "prepare", "small.yaml", "regenerate.backend=openai", code=2)
    assert "server.url" in result.output


def test_the_stop_token_is_the_one_that_the_server_names(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        eos = server.tokenizer.eos_token_id
        request = Request("1", (5, 6), 4, Sampling(), frozenset({eos, 9}))

        def answer(**fields: Any) -> tuple[int, ...]:
            server.changes = {"finish_reason": "stop", "token_ids": [7], **fields}
            return decoder(server).generate(request, 64, threading.Event()).token_ids

        assert answer() == (7, eos)
        assert answer(token_ids=[7, 9]) == (7, 9)
        assert answer(stop_reason=9) == (7, 9), "vLLM"
        assert answer(matched_stop=9) == (7, 9), "SGLang"
        for reason in ({"stop_reason": "\n\n"}, {"matched_stop": "\n\n"}, {"stop_reason": 8}):
            with pytest.raises(UserError, match="no stop token"):
                answer(**reason)


def test_a_request_has_the_room_behind_its_prompt(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.changes = {"finish_reason": "length", "token_ids": [7]}
        requests = [Request(str(n), (5, 6), n, Sampling(), frozenset({9})) for n in (4, 40)]
        for request in requests:
            decoder(server).generate(request, 16, threading.Event())
        assert sorted(body["max_tokens"] for body in server.requests) == [4, 14]


def test_the_text_of_a_cut_answer_may_end_within_a_character(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        server.text_only = True
        server.changes = {"finish_reason": "length", "text": "return x\ufffd"}
        request = Request("1", (5, 6), 4, Sampling(), frozenset({9}))
        generation = decoder(server).generate(request, 64, threading.Event())
        expected = server.tokenizer.encode("return x", add_special_tokens=False)
        assert list(generation.token_ids) == expected


class Chunks:
    """Nine conversations, and how many of them were taken."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        turn = [{"role": "user", "content": "x"}]
        for i in range(9):
            self.taken += 1
            prompt = Conversation(str(i), turn, "s")
            yield [Draft(prompt, 0.0, [turn], array("i", (5, 6)))]


def answered_by(
    decoder: Any, server: CompletionServer, chunks: Any = None
) -> Iterator[list[Draft]]:
    """Yield conversations as a decoder answers them."""
    settings = RegenerateSettings(max_new_tokens=4)
    generator = AnswerGenerator(server.tokenizer, settings, 0, frozenset({9}), 64)
    return answers._answer_at_server(
        generator, chunks or Chunks(), decoder, answers._Throughput(Monitor(), 9, 0)
    )


def test_answers_before_a_failure_are_kept(workshop: Path) -> None:
    """Also those that wait for a slower one when another behind them fails."""

    class Failing:
        concurrency, failed = 2, threading.Event()

        def generate(self, request: Request, *_: Any) -> Generation:
            if request.id == "2":
                self.failed.set()
                raise UserError("no answer")
            if request.id == "0":
                self.failed.wait(10)
                time.sleep(0.2)
            return Generation(request.id, (7,), "length", Counters(0), (), (), 0.0, 0.0)

    with serve(workshop / "toy") as server:
        answered = answered_by(Failing(), server, chunks := Chunks())
        assert [draft.prompt.id for draft in next(answered)] == ["0", "1"]
        assert chunks.taken == 6, "twice what runs at once beyond those that are answered"
        with pytest.raises(UserError, match="no answer"):
            next(answered)


def test_nothing_is_asked_after_the_end(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        request, stopped = Request("1", (5, 6), 4, Sampling(), frozenset({9})), threading.Event()
        stopped.set()
        with pytest.raises(CancelledError):
            decoder(server).generate(request, 64, stopped)
        assert not server.requests


def test_leaving_the_answers_does_not_wait_for_the_server(workshop: Path) -> None:
    with serve(workshop / "toy") as server:
        answered = answered_by(decoder(server), server)
        next(answered)
        server.hold = threading.Event()
        closing = threading.Thread(target=answered.close)
        closing.start()
        closing.join(30)
        left = not closing.is_alive()
        server.hold.set()
        while server.in_work:
            time.sleep(0.01)
        assert left
