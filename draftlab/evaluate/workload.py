"""What an evaluation asks of an engine, whichever it is: requests, counting, timing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.adviser import StepPoint
from draftlab.evaluate.bandwidth import floor_ms
from draftlab.evaluate.grid import PLAIN, Arm, NamedHead, all_arms, arms
from draftlab.evaluate.metrics import timing
from draftlab.evaluate.results import Timing
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import Decoder, Timed, time_arms
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.text.suites import Suite


@dataclass
class Measured:
    """What one engine measured: every cell (temperature, arm) of the grid.

    Attributes:
        engine, version: as rows call it.
        counted: generations of the whole suite, in its order.
        timings: one for each timed batch; empty when nothing was timed.
        probes: step times for the adviser.
        warnings: of every row of this engine.
    """

    engine: str
    version: str
    counted: dict[tuple[float, Arm], list[Generation]] = field(default_factory=dict)
    timings: dict[tuple[float, Arm], list[Timing]] = field(default_factory=dict)
    probes: list[StepPoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """The prompts and settings of an evaluation.

    Attributes:
        suite: the prompts that are taken.
        stop_ids: tokens that end an answer.
    """

    target: Target
    heads: tuple[NamedHead, ...]
    suite: Suite
    stop_ids: frozenset[int]
    settings: EvalSettings
    monitor: Monitor

    @property
    def arms(self) -> list[Arm]:
        """Every way of decoding, plain first."""
        return all_arms(self.heads, self.settings)

    def arms_at(self, temperature: float) -> list[Arm]:
        """Those that differ at a temperature, plain first."""
        return arms(self.heads, self.settings, temperature)

    @property
    def batch(self) -> int:
        """Prompts decoded at once for the counters."""
        return min(self.settings.batch, len(self.suite.prompts))

    @property
    def max_length(self) -> int:
        """Positions of the longest request, drafts included."""
        longest = max(len(ids) for _, ids in self.suite.prompts)
        answer = max(self.settings.max_new_tokens, self.settings.timing_tokens)
        deepest = max(arm.k for arm in self.arms)
        return min(longest + answer + deepest + 1, self.target.max_length)

    def requests(self, temperature: float, *, timed: bool = False) -> list[Request]:
        """The suite's; timed ones have their own length and never stop."""
        settings = self.settings
        sampling = Sampling(temperature, settings.top_k, settings.top_p, settings.seed)
        tokens = settings.timing_tokens if timed else settings.max_new_tokens
        stops = frozenset() if timed else self.stop_ids
        return [Request(id_, ids, tokens, sampling, stops) for id_, ids in self.suite.prompts]

    def count(self, into: Measured, engine: Decoder, arm: Arm) -> None:
        """Decodes the suite at every temperature that the arm belongs to."""
        for temperature in self.settings.temperatures:
            if arm in self.arms_at(temperature):
                into.counted[temperature, arm] = self._decode(engine, temperature, arm, into.engine)

    def _decode(self, engine: Decoder, temperature: float, arm: Arm, name: str) -> list[Generation]:
        requests = self.requests(temperature)
        done: dict[str, Generation] = {}
        tokens, started = 0, time.perf_counter()
        for generation in engine.generate(requests):
            done[generation.id] = generation
            tokens += len(generation.token_ids)
            self.monitor.progress(
                f"{name} T={temperature:g}, {arm.name}",
                len(done),
                len(requests),
                f"{tokens / (time.perf_counter() - started):,.0f} tokens/s",
            )
        generations = [done[request.id] for request in requests]
        total: Counters = reduce(add, (g.counters for g in generations))
        total.check_tokens(tokens, len(generations))
        return generations

    def time(
        self, engines: Mapping[Arm, Decoder], temperature: float, batch: int, name: str
    ) -> dict[Arm, Timed]:
        """Times arms in turn."""
        return time_arms(
            self.target.device,
            engines,
            self.requests(temperature, timed=True),
            self.settings.timing_prompts,
            batch,
            monitor=self.monitor,
            stage=f"{name} time T={temperature:g}, batch {batch}",
        )

    def timing(self, timed: Mapping[Arm, Timed], arm: Arm, batch: int) -> Timing | None:
        """An arm's times beside those of plain decoding, which `timed` holds too."""
        return timing(
            timed[arm],
            timed[PLAIN] if arm != PLAIN else None,
            batch=batch,
            floor=floor_ms(self.target, arm.head.head if arm.head else None, arm.k),
        )
