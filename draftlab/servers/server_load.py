"""A running server under load: streamed requests to it, and their times.

Prompts are sent as token ids, so the server applies no chat template. A request that the server
refuses as busy is repeated and counted. One whose stream breaks off, takes too long or is no answer
is counted as failed: the server may have decoded it, so it is neither repeated nor measured.
"""

from __future__ import annotations

import json
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from http.client import HTTPException
from threading import Event
from typing import IO, Any

from draftlab.errors import UserError
from draftlab.servers.connection import (
    API_KEY,
    BASE_URL,
    CALL_S,
    FREE_BYTES,
    MAX_TEXT,
    Connection,
    in_threads,
    served_card,
)
from draftlab.servers.repeated_requests import FIRST_WAIT_S, REPEATED, TOO_LONG, completion_body
from draftlab.servers.server_counters import PROGRAMS, ServerCounters, parse_counters
from draftlab.servers.settings import BenchSettings

_EVENT_BYTES = 1 << 14
"""Most bytes of a stream for each token that was asked for."""
_SETTLE_S, _SETTLED_S = 10.0, 0.2
"""Seconds that counters may take to stop changing, and for which they are then equal."""


class _Fault(Exception):
    """What is wrong with an answer."""


@dataclass(frozen=True)
class Answer:
    """A measured request.

    Attributes:
        prompt: number of its prompt.
        tokens: output tokens, by the server's count.
        prompt_tokens: tokens of the prompt, by the server's count; None: it does not say.
        started_s: `time.perf_counter()` when it was first sent, or should have arrived (open loop).
        first_token_s, total_s: seconds from then until the first token and the last one.
        pieces: pieces of the stream after the first one that had tokens.
        drafts, draft_tokens, accepted: the server's counters of this request alone; None where it
            does not state them.
    """

    prompt: int
    tokens: int
    prompt_tokens: int | None
    started_s: float
    first_token_s: float
    total_s: float
    pieces: int
    drafts: int | None = None
    draft_tokens: int | None = None
    accepted: int | None = None


@dataclass
class LoadResult:
    """What came of the requests, as far as they were sent.

    Attributes:
        failures, retries: numbers of failed and of repeated requests, by the reason.
        late_s: the most by which an open loop sent a request too late.
    """

    answers: list[Answer] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    late_s: float = 0.0


class LoadedServer:
    """A running server that is measured.

    Args:
        say: receives lines for the user.

    Attributes:
        card: what the server says of its model.
        program: the program's name; "the server": unknown.
        cache_dtype: see `ServerCounters`.
        no_counters: why there are no counters; "": there are.

    Raises:
        UserError: the server cannot be reached, or does not serve the named model.
    """

    def __init__(self, url: str, settings: BenchSettings, say: Callable[[str], None]) -> None:
        self.settings, self.connection = settings, Connection(url)
        self.url, self.no_counters = self.connection.url, ""
        if self.connection.key_note:
            say(self.connection.key_note)
        self.card = self._served_model()
        self.model: str = self.card["id"]
        counters = self.counters()
        owner = counters.program if counters else self.card.get("owned_by")
        self.program = PROGRAMS.get(str(owner), "the server")
        self.cache_dtype = counters.cache_dtype if counters else ""

    def _served_model(self) -> dict[str, Any]:
        models, fault = self.connection.ask("/v1/models")
        do = "name one of them with --model"
        card = served_card(models, self.settings.model or None, where=self.url, do=do)
        if card is None:
            found = fault or f"found {json.dumps(models)[:MAX_TEXT]}"
            do = "name a running server with OpenAI's interface"
            if "HTTP 401" in found or "HTTP 403" in found:
                do = f"set {API_KEY} to the server's key, and {BASE_URL}={self.url}"
            raise UserError(f"expected the server's models, {found}", where=self.url, do=do)
        return card

    def counters(self) -> ServerCounters | None:
        """Read the server's counters; None: it shows none (`no_counters` says why)."""
        try:
            with self.connection.open("/metrics", timeout_s=CALL_S) as answer:
                page = answer.read(8 * FREE_BYTES + 1)
            if len(page) > 8 * FREE_BYTES:
                raise ValueError(f"a page of more than {8 * FREE_BYTES:,} bytes")
            counters = parse_counters(page.decode(errors="replace"))
            self.no_counters = "" if counters else "its metrics are of an unknown program"
        except (OSError, HTTPException, ValueError) as error:
            counters, self.no_counters = None, f"/metrics: {self.connection.reason(error)}"
        return counters

    def settled_counters(self, least: int = 0) -> tuple[ServerCounters | None, bool]:
        """Read the counters once they have stopped changing; return them, and whether they have.

        A server counts the last steps of a request a moment after it has answered.

        Args:
            least: tokens that are waited for.
        """
        end, last = time.monotonic() + _SETTLE_S, self.counters()
        while last is not None:
            time.sleep(_SETTLED_S)
            now = self.counters()
            quiet = now == last and now is not None and not now.values.get("running")
            if (quiet and now.values.get("tokens", least) >= least) or time.monotonic() > end:
                return now, quiet
            last = now
        return None, True

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Let the server answer prompts at once, with a few tokens each.

        Raises:
            UserError: it answers none of them.
        """
        result = LoadResult()
        self.run(list(enumerate(prompts)), result, at_once=len(prompts), max_tokens=4)
        if not result.answers:
            raise UserError(
                f"expected answers of the server, found {'; '.join(result.failures)}",
                where=f"{self.url}/v1/completions",
                do="see its log; prompts are sent as token ids, as vLLM, SGLang and llama.cpp "
                "read them",
            )

    def run(
        self,
        prompts: Sequence[tuple[int, Sequence[int]]],
        result: LoadResult,
        *,
        at_once: int,
        arrivals: Sequence[float] | None = None,
        max_tokens: int | None = None,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Send prompts, and add what comes of each to `result`; an interruption leaves the rest.

        Args:
            prompts: number and token ids of each request's prompt.
            at_once: most requests that run at once.
            arrivals: seconds from now at which each is sent; None: as soon as there is room.
        """
        start, salt, copies = time.perf_counter(), f"draftlab-{time.time_ns()}", Counter[int]()
        jobs = []
        for n, (number, ids) in enumerate(prompts):
            copies[number] += 1
            own = f"{salt}-{copies[number]}"
            most = max_tokens or self.settings.max_new_tokens
            # No seed: with one vLLM samples the requests one after the other.
            body = completion_body(self.model, ids, most, self.settings.temperature) | {
                "stream": True,
                "stream_options": {"include_usage": True},
                # No prompt is read from the cache of an earlier measurement, or of its own earlier
                # copy in this one (vLLM, SGLang; llama.cpp).
                "cache_salt": own,
                "cache_prompt": False,
            }
            jobs.append((number, body, None if arrivals is None else start + arrivals[n]))
        with in_threads(self._ask, at_once) as submit:
            futures = list(map(submit, jobs))
            left = set(futures)

            def add(future: Any) -> None:
                left.discard(future)
                outcome, retries, late = future.result()
                result.retries += retries
                result.late_s = max(result.late_s, late)
                if isinstance(outcome, Answer):
                    result.answers.append(outcome)
                else:
                    result.failures[outcome] += 1

            try:
                for done, future in enumerate(as_completed(futures), 1):
                    add(future)
                    progress(done)
            finally:
                for future in [future for future in left if future.done()]:
                    add(future)

    def _ask(
        self, job: tuple[int, dict[str, Any], float | None], stopped: Event
    ) -> tuple[Answer | str, Counter[str], float]:
        """Return the answer to a prompt or why there is none, its retries, and how late it was."""
        number, body, due = job
        retries, late = Counter[str](), 0.0
        if due is not None:
            if stopped.wait(max(due - time.perf_counter(), 0.0)):
                return "interrupted", retries, late
            late = time.perf_counter() - due
        wait, timeout_s = FIRST_WAIT_S, self.settings.timeout_s
        start = time.perf_counter() if due is None else due  # a refused request waits from here on
        for attempt in range(1, self.settings.attempts + 1):
            try:
                with self.connection.open("/v1/completions", body, timeout_s=timeout_s) as stream:
                    return self._read(stream, number, body, start), retries, late
            except urllib.error.HTTPError as error:
                code, reason = error.code, self.connection.reason(error)
                if code == 400 and TOO_LONG.search(reason):
                    return "no room for the prompt and its answer (HTTP 400)", retries, late
                if code not in REPEATED and code < 500:
                    return reason, retries, late
                reason = f"HTTP {code}"
            except _Fault as fault:
                return self.connection.without_key(str(fault))[:MAX_TEXT], retries, late
            except (OSError, HTTPException, ValueError) as error:
                reason = self.connection.reason(error)
                if not isinstance(getattr(error, "reason", None), ConnectionRefusedError):
                    return reason, retries, late
            if attempt == self.settings.attempts:
                return f"{reason} ({attempt} attempts)", retries, late
            retries[reason] += 1
            if stopped.wait(wait):
                break
            wait = min(2 * wait, 60.0)
        return "interrupted", retries, late

    def _read(self, stream: IO[bytes], number: int, body: dict[str, Any], start: float) -> Answer:
        """Return the answer of a stream of server-sent events.

        Raises:
            _Fault: it is none, or it is cut.
        """
        limit = body["max_tokens"]
        left = FREE_BYTES + _EVENT_BYTES * limit
        first, end, pieces, ids, finish = None, start, 0, 0, None
        said: dict[str, Any] = {}
        while line := stream.readline(min(left, FREE_BYTES) + 1):
            now = time.perf_counter()
            left -= len(line)
            if left < 0 or len(line) > FREE_BYTES:
                raise _Fault("an answer of too many bytes")
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                break
            if len(data) == len(line.strip()):  # an empty line, a comment or the kind of an event
                continue
            event = _event(data)
            said |= {key: event[key] for key in ("usage", "timings", "metrics") if event.get(key)}
            for choice in event.get("choices") or ():
                if finish:
                    raise _Fault("expected the end of an answer, found more of it")
                text, tokens = choice.get("text") or "", choice.get("token_ids") or ()
                if not isinstance(text, str) or not isinstance(tokens, list | tuple):
                    raise _Fault("expected a text and a list of token ids, found other types")
                ids += len(tokens)
                if text or tokens:
                    pieces += first is not None
                    first = first or now
                end = now  # the usage follows, of which vLLM's own client takes no time either
                finish = choice.get("finish_reason")
                if finish not in (None, "stop", "length"):
                    raise _Fault(f"the answer ended by {finish!r:.40}")
        if finish is None:
            raise _Fault("the stream was cut")
        (prompt_tokens,) = _counts(said.get("usage"), "prompt_tokens")
        return Answer(
            number,
            _tokens(said, ids, limit),
            prompt_tokens,
            start,
            (first or end) - start,
            end - start,
            pieces,
            *_own_counters(said),
        )


def _event(data: bytes) -> dict[str, Any]:
    """Return an event of a stream, whose choices are one or none.

    Raises:
        _Fault: it is none, or the server reports an error.
    """
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise _Fault("the stream was cut, or is no JSON") from None
    choices = event.get("choices", []) if isinstance(event, dict) else None
    if isinstance(event, dict) and event.get("error"):
        raise _Fault(f"the server reports {json.dumps(event['error'])[:MAX_TEXT]}")
    is_list = isinstance(choices, list) and len(choices) <= 1
    if not is_list or not all(isinstance(choice, dict) for choice in choices):
        raise _Fault("expected events with one choice, found another")
    return event


def _counts(fields: Any, *names: str) -> list[int | None]:
    """Return counts of a server; None: it does not state it.

    Raises:
        _Fault: one is no count.
    """
    found = {name: fields.get(name) if isinstance(fields, dict) else None for name in names}
    for name, value in found.items():
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 40):
            raise _Fault(f"expected {name} to be a count, found {value!r:.40}")
    return list(found.values())


def _tokens(said: dict[str, Any], ids: int, limit: int) -> int:
    """Return the number of an answer's tokens, of which the stream had so many ids."""
    (tokens,) = _counts(said.get("usage"), "completion_tokens")
    if tokens is None:
        tokens = ids or _counts(said.get("timings"), "predicted_n")[0]
    if tokens is None or tokens > limit:
        raise _Fault(f"expected a count of at most {limit:,} tokens, found {tokens}")
    if ids and ids != tokens:
        raise _Fault("expected as many token ids as the answer has tokens, found others")
    return tokens


def _own_counters(said: dict[str, Any]) -> Sequence[int | None]:
    """Return drafts, draft tokens and accepted ones of an answer, as far as it states them.

    They are llama.cpp's timings, or with --per-request-spec-decode-metrics vLLM's metrics.
    """
    timings, metrics = said.get("timings"), said.get("metrics")
    if isinstance(timings, dict):
        drafted, accepted = _counts(timings, "draft_n", "draft_n_accepted")
        found = [None, drafted or 0, accepted or 0]
    else:
        own = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
        names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        found = _counts(own, *names)
        if None in found:
            return ()
    if (found[2] or 0) > (found[1] or 0):
        raise _Fault("expected no more accepted drafts than drafts, found more")
    return found
