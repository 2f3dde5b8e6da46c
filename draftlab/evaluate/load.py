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

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.settings import LOAD_ROUNDS
from draftlab.evaluate.timing import WARM_UP_TOKENS, Decoder, repeated_request

FOLLOWING_PER_SLOT = 4
"""Following requests for each that runs at once; more are needed only if answers are much shorter
than the last measured one."""


@dataclass(frozen=True)
class Stream:
    """The requests of a round, in three parts."""

    starting: list[Request]
    measured: list[Request]
    following: list[Request]

    @property
    def requests(self) -> list[Request]:
        """All requests, in the order of their admission."""
        return self.starting + self.measured + self.following


@dataclass
class LoadRun:
    """The generations of one configuration under load, and how many requests ran.

    Attributes:
        measured: generations of the measured requests of all rounds, in the order of the streams.
        busy_s: summed seconds for which requests ran in the windows of `window_s`.
        window_s: seconds between the first and the last admission of a measured request, over all
            rounds.
    """

    measured: list[Generation] = field(default_factory=list)
    busy_s: float = 0.0
    window_s: float = 0.0

    @property
    def mean_running(self) -> float:
        """Mean number of requests that ran at once while measured ones were admitted."""
        return self.busy_s / self.window_s


def load_streams(
    requests: Sequence[Request], size: int, concurrency: int, rounds: int = LOAD_ROUNDS
) -> list[Stream]:
    """Return a stream of `size` measured requests for each round.

    A short suite is repeated. A copy of a prompt has its own id, and so its own sampling noise.
    """
    others = iter(range(rounds * size, 10**9))

    def take(indices: Sequence[int]) -> list[Request]:
        return [repeated_request(requests, i) for i in indices]

    streams = []
    for start in range(0, rounds * size, size):
        starting = [
            replace(request, max_new_tokens=-(-request.max_new_tokens * (i + 1) // concurrency))
            for i, request in enumerate(take([next(others) for _ in range(concurrency)]))
        ]
        following = take([next(others) for _ in range(FOLLOWING_PER_SLOT * concurrency)])
        streams.append(Stream(starting, take(range(start, start + size)), following))
    return streams


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
    run.measured += measured
    run.busy_s += busy_seconds(finished.values(), start, stop)
    run.window_s += stop - start


def busy_seconds(generations: Sequence[Generation], start: float, stop: float) -> float:
    """Return the summed seconds that the requests spent between two times."""
    overlaps = (min(g.started_s + g.total_s, stop) - max(g.started_s, start) for g in generations)
    return sum(max(overlap, 0.0) for overlap in overlaps)


def decode_under_load(
    engines: Mapping[DecodingConfig, Decoder],
    streams: Sequence[Stream],
    progress: Callable[[int, int], None],
) -> dict[DecodingConfig, LoadRun]:
    """Decode the same streams with every engine in turn.

    Args:
        progress: called with the number of finished rounds and of all rounds.
    """
    runs = {config: LoadRun() for config in engines}
    for engine in engines.values():
        _warm_up(engine, streams)
    order, done = list(engines), 0
    for stream in streams:
        for config in order:
            decode_stream(engines[config], stream, runs[config])
            done += 1
            progress(done, len(streams) * len(engines))
        order.reverse()
    return runs


def _warm_up(engine: Decoder, streams: Sequence[Stream]) -> None:
    """Compile and capture what a full batch needs; no other size of batch is measured.

    draftlab's engine first captures what a prompt of any stream may need. The answers of the first
    stream end after different numbers of tokens, so that prompts are admitted alone and together,
    as they will be: a prompt of another shape compiles kernels of its own. A capture gives unused
    memory back to the device, so the longest prompt, which may be too long for a graph, is the
    last.
    """
    everything = [request for stream in streams for request in stream.requests]
    if isinstance(engine, Engine):
        engine.capture_prefills(everything)
    stream = streams[0]
    requests = [
        replace(request, max_new_tokens=2 + i % WARM_UP_TOKENS, stop_ids=frozenset())
        for i, request in enumerate(stream.starting + stream.measured)
    ]
    longest = max(everything, key=lambda request: len(request.prompt_ids))
    for batch in (requests, [replace(longest, max_new_tokens=2)]):
        for _ in engine.generate(batch):
            pass
