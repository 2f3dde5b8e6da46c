"""A server with a clock of its own, whose every token has a known time, under load."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import islice

import numpy as np

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request
from draftlab.evaluate.load import LoadRun, Stream, decode_stream, load_streams
from draftlab.evaluate.settings import EvalSettings

STEP_S, PREFILL_S = 0.01, 0.003


class Simulation:
    """A server with a clock of its own: every step takes `STEP_S`, every prefill `PREFILL_S`.

    Attributes:
        token_times: times at which tokens were emitted, of all requests.
    """

    def __init__(self, concurrency: int, *, gap_s: float = 0.0, tokens_a_step: int = 1) -> None:
        self.concurrency, self.gap_s, self.tokens_a_step = concurrency, gap_s, tokens_a_step
        self.now, self.token_times = 100.0, []

    def generate(self, requests: Sequence[Request]) -> Generator[Generation]:
        waiting = list(requests)
        running: list[list] = []  # request, tokens, admission, first token
        while waiting or running:
            admitted, self.now = self.now, self.now + self.gap_s
            while waiting and len(running) < self.concurrency:
                admitted, self.now = self.now, self.now + PREFILL_S
                running.append([waiting.pop(0), 1, admitted, self.now])
                self.token_times.append(self.now)
            self.now += STEP_S
            for one in list(running):
                new = min(self.tokens_a_step, one[0].max_new_tokens - one[1])
                one[1] += new
                self.token_times += [self.now] * new
                if one[1] >= one[0].max_new_tokens:
                    running.remove(one)
                    yield self._generation(*one)

    def _generation(
        self, request: Request, count: int, admitted: float, first: float
    ) -> Generation:
        steps = ((0, 0),) * math.ceil((count - 1) / self.tokens_a_step)
        counters = Counters(0, undrafted_steps=len(steps))
        times = first - admitted, self.now - admitted, admitted
        return Generation(request.id, (1,) * count, "length", counters, (), steps, *times)


def varied_requests(count: int, longest: int = 60) -> list[Request]:
    lengths = np.random.default_rng(1).integers(5, longest, count)
    return [Request(str(i), (1, 2), int(n)) for i, n in enumerate(lengths)]


def streams_of(suite: Sequence[Request], prompts: int, concurrency: int) -> list[Stream]:
    size = EvalSettings(timing_prompts=prompts).requests_under_load(concurrency)
    return [*islice(load_streams(suite, size, concurrency), 2)]


def simulate(concurrency: int, prompts: int = 400, **options: float) -> tuple[LoadRun, Simulation]:
    engine = Simulation(concurrency, **options)
    run = LoadRun()
    for stream in streams_of(varied_requests(prompts), prompts, concurrency):
        decode_stream(engine, stream, run)
    return run, engine
