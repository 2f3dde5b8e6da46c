"""The load pass: decode a stream of requests while C of them always run (a closed loop).

A request that finishes is replaced by the next one of the stream, which has three parts:

    starting (C) ─► measured (N) ─► following (as many as needed)

The starting requests have staggered length limits, so that requests do not end in lockstep and the
first measured ones do not meet C prompts at once. The following ones keep the load up until the
last measured request has finished; then the round ends, and nothing of the drain is measured.
Every configuration decodes the same streams in turn, in the reverse order in every other round, so
that a steady drift of the machine's speed affects all of them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice
from math import ceil

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.settings import LOAD_ROUNDS
from draftlab.evaluate.timing import (
    WARM_UP_TOKENS,
    Decoder,
    collected_garbage,
    have_graphs,
    repeated_request,
)

OTHERS = 10**6
"""Place in the repeated suite from which on starting and following requests are taken."""
FOLLOWING_PER_SLOT = 4
"""Following requests for each that runs at once; more are needed only if answers are much shorter
than the last measured one."""


@dataclass(frozen=True)
class Stream:
    """The requests of a round, in three parts.

    Attributes:
        prompts: the number in the suite of each measured request's prompt.
    """

    starting: list[Request]
    measured: list[Request]
    following: list[Request]
    prompts: list[int]

    @property
    def requests(self) -> list[Request]:
        """All requests, in the order of their admission."""
        return self.starting + self.measured + self.following


@dataclass(frozen=True)
class LoadRound:
    """The measured requests of one stream, and how many requests ran.

    Attributes:
        measured: their generations, in the order of the stream.
        prompts: the number in the suite of each one's prompt.
        busy_s: summed seconds for which requests ran in the window of `window_s`.
        window_s: seconds between the first and the last admission of a measured request.
    """

    measured: list[Generation]
    prompts: list[int]
    busy_s: float
    window_s: float


@dataclass
class LoadRun:
    """The rounds of one configuration under load."""

    rounds: list[LoadRound] = field(default_factory=list)

    @property
    def measured(self) -> list[Generation]:
        """The generations of all measured requests, in the order of the streams."""
        return [generation for one in self.rounds for generation in one.measured]

    @property
    def prompts(self) -> list[int]:
        """The number in the suite of each measured request's prompt."""
        return [prompt for one in self.rounds for prompt in one.prompts]

    @property
    def seconds(self) -> float:
        """Seconds from the first admission to the last end of measured requests, of all rounds."""
        return sum(
            max(g.started_s + g.total_s for g in one.measured)
            - min(g.started_s for g in one.measured)
            for one in self.rounds
        )

    @property
    def mean_running(self) -> float:
        """Mean number of requests that ran at once while measured ones were admitted."""
        return sum(one.busy_s for one in self.rounds) / sum(one.window_s for one in self.rounds)


def load_streams(requests: Sequence[Request], size: int, concurrency: int) -> Iterator[Stream]:
    """Yield streams of `size` measured requests, one after the other and without end.

    The suite is repeated. A copy of a prompt has its own id, and so its own sampling noise.
    """
    others = count(OTHERS)

    def take(indices: Iterable[int]) -> list[Request]:
        return [repeated_request(requests, i) for i in indices]

    for start in count(0, size):
        starting = [
            replace(request, max_new_tokens=-(-request.max_new_tokens * (i + 1) // concurrency))
            for i, request in enumerate(take(islice(others, concurrency)))
        ]
        following = take(islice(others, FOLLOWING_PER_SLOT * concurrency))
        measured = range(start, start + size)
        prompts = [i % len(requests) for i in measured]
        yield Stream(starting, take(measured), following, prompts)


def decode_stream(engine: Decoder, stream: Stream, run: LoadRun) -> None:
    """Decode a stream until its measured requests have finished; add the round to `run`."""
    awaited = {request.id for request in stream.starting + stream.measured}
    finished: dict[str, Generation] = {}
    with closing(engine.generate(stream.requests)) as generations:
        for generation in generations:
            finished[generation.id] = generation
            awaited.discard(generation.id)
            if not awaited:
                break
    measured = [finished[request.id] for request in stream.measured]
    admissions = [generation.started_s for generation in measured]
    start, stop = min(admissions), max(admissions)
    busy_s = busy_seconds(finished.values(), start, stop)
    run.rounds.append(LoadRound(measured, stream.prompts, busy_s, stop - start))


def busy_seconds(generations: Iterable[Generation], start: float, stop: float) -> float:
    """Return the summed seconds that the requests spent between two times."""
    overlaps = (min(g.started_s + g.total_s, stop) - max(g.started_s, start) for g in generations)
    return sum(max(overlap, 0.0) for overlap in overlaps)


def decode_under_load(
    engines: Mapping[DecodingConfig, Decoder],
    suite: Sequence[Request],
    streams: Iterator[Stream],
    progress: Callable[[int, int], None],
    *,
    rounds: int = LOAD_ROUNDS,
    least_s: float = 0.0,
) -> dict[DecodingConfig, LoadRun]:
    """Decode the same streams with every engine in turn.

    Args:
        suite: the requests that the streams repeat.
        progress: called with the number of finished rounds and of all rounds, as far as known.
        rounds: least streams.
        least_s: least seconds of measured requests of each engine; streams follow until then.
    """
    runs = {config: LoadRun() for config in engines}
    first = next(streams)
    for _ in range(2 if have_graphs(engines.values()) else 1):
        for engine in engines.values():
            _warm_up(engine, suite, first)
    with collected_garbage():
        order, expected = list(engines), rounds
        for before, stream in enumerate(chain([first], streams)):
            for done, config in enumerate(order, before * len(order) + 1):
                decode_stream(engines[config], stream, runs[config])
                progress(done, expected * len(order))
            order.reverse()
            seconds = min(run.seconds for run in runs.values())
            expected = max(rounds, ceil((before + 1) * least_s / seconds))
            if before + 1 >= expected:
                break
    return runs


def _warm_up(engine: Decoder, suite: Sequence[Request], stream: Stream) -> None:
    """Compile and capture what a full batch needs; no other size of batch is measured.

    draftlab's engine first captures what a prompt of the suite may need. The answers of the stream
    end after different numbers of tokens, so that prompts are admitted alone and together, as they
    will be: a prompt of another shape compiles kernels of its own. The longest prompt may be too
    long for a graph.
    """
    if isinstance(engine, Engine):
        engine.capture_prefills(suite)
    requests = [
        replace(request, max_new_tokens=2 + i % WARM_UP_TOKENS, stop_ids=frozenset())
        for i, request in enumerate(stream.starting + stream.measured)
    ]
    longest = max(suite, key=lambda request: len(request.prompt_ids))
    for batch in (requests, [replace(longest, max_new_tokens=2)]):
        for _ in engine.generate(batch):
            pass
