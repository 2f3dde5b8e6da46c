"""The workload of an evaluation: its requests, and how engines decode and time them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from draftlab.engine.counters import Counters
from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine, decoding_threads, one_thread
from draftlab.engine.kv_pool import draft_kv_bytes, new_kv_pool
from draftlab.engine.sampling import Generation, Request, Sampling
from draftlab.evaluate.adviser import Probe
from draftlab.evaluate.decoding_config import (
    PLAIN_DECODING,
    DecodingConfig,
    NamedHead,
    configs_at,
    more_ks,
)
from draftlab.evaluate.metrics import Decoded, timing, without_disturbed
from draftlab.evaluate.results import Timing
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import Decoder, TimedRun, time_in_turn, timing_batches
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.target_model.paged_cache import PagedCache
from draftlab.text.suites import Prompts, Suite
from draftlab.version import package_version


def _title(action: str, engine: str, text: str) -> str:
    """Return a title for progress, which names an engine that is not draftlab's."""
    return f"{action} {text}" if engine == "draftlab" else f"{action} with {engine}, {text}"


@dataclass
class EngineResults:
    """What one engine measured, by temperature and decoding configuration.

    Attributes:
        engine, version: name and version for the rows.
        generations: answers to the whole suite, in its order.
        timings: one entry per timed batch size; no entry if nothing was timed.
        steps: what the prompts of the first timed batch size took, with the configuration and
            without drafts (None: there is nothing to compare with).
        probes: timings of K's without rows, for the adviser.
        warnings: warnings for every row of this engine.
    """

    engine: str
    version: str
    generations: dict[tuple[float, DecodingConfig], list[Generation]] = field(default_factory=dict)
    timings: dict[tuple[float, DecodingConfig], list[Timing]] = field(default_factory=dict)
    steps: dict[tuple[float, DecodingConfig], tuple[Decoded, Decoded | None]] = field(
        default_factory=dict
    )
    probes: list[Probe] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """The target, heads, prompts and settings of an evaluation.

    Attributes:
        suite: the prompts to decode.
        stop_ids: tokens that end an answer.
    """

    target: Target
    heads: tuple[NamedHead, ...]
    suite: Suite
    stop_ids: frozenset[int]
    settings: EvalSettings
    monitor: Monitor

    @property
    def configs(self) -> list[DecodingConfig]:
        """The configurations that some temperature needs, plain decoding first."""
        each = (config for t in self.settings.temperatures for config in self.configs_at(t))
        return list(dict.fromkeys(each))

    def configs_at(self, temperature: float) -> list[DecodingConfig]:
        """Return the configurations of a temperature, plain decoding first."""
        return configs_at(self.heads, self.settings, temperature)

    @property
    def sampled_configs(self) -> list[tuple[float, DecodingConfig]]:
        """The drafting configurations at T > 0, with their temperatures."""
        ts = filter(None, self.settings.temperatures)
        return [(t, config) for t in ts for config in self.configs_at(t) if config.head]

    @property
    def batch(self) -> int:
        """Prompts decoded at once for the counters."""
        return min(self.settings.batch, len(self.suite.prompts))

    @property
    def max_length(self) -> int:
        """Positions of the longest request, drafts included."""
        longest = max(len(ids) for _, ids in self.suite.prompts)
        answer = max(self.settings.max_new_tokens, self.settings.timing_tokens)
        max_k = max(config.k for config in self.configs)
        return min(longest + answer + max_k + 1, self.target.max_length)

    @property
    def timed_prompts(self) -> Prompts:
        """The prompts in an order of which every beginning represents the suite."""
        return self.suite.evenly_ordered(self.settings.seed)

    def requests(self, temperature: float, *, timed: bool = False) -> list[Request]:
        """Return the requests of the suite.

        Timed ones have their own length limit and the order of `timed_prompts`.
        """
        settings = self.settings
        sampling = Sampling(temperature, settings.top_k, settings.top_p, settings.seed)
        tokens = settings.timing_tokens if timed else settings.max_new_tokens
        prompts = self.timed_prompts if timed else self.suite.prompts
        return [Request(id_, ids, tokens, sampling, self.stop_ids) for id_, ids in prompts]

    def decode(self, results: EngineResults, engine: Decoder, config: DecodingConfig) -> None:
        """Decode the suite at every temperature of the configuration; add it to the results."""
        for t in self.settings.temperatures:
            if config in self.configs_at(t):
                stage = _title("decoding", results.engine, f"T = {t:g}, {config.name_at(t)}")
                results.generations[t, config] = self._decode(engine, self.requests(t), stage)

    def _decode(self, engine: Decoder, requests: list[Request], stage: str) -> list[Generation]:
        by_id: dict[str, Generation] = {}
        tokens, started = 0, time.perf_counter()
        with decoding_threads(self.target):
            for generation in engine.generate(requests):
                by_id[generation.id] = generation
                tokens += len(generation.token_ids)
                rate = f"{tokens / (time.perf_counter() - started):,.0f} tokens/s"
                self.monitor.progress(stage, len(by_id), len(requests), rate)
        generations = [by_id[request.id] for request in requests]
        Counters.total(g.counters for g in generations).check_tokens(tokens, len(generations))
        return generations

    def time(
        self, engines: Mapping[DecodingConfig, Decoder], temperature: float, batch: int, name: str
    ) -> dict[DecodingConfig, TimedRun]:
        """Decode the timed requests with every engine in turn.

        Args:
            name: engine name for progress.
        """
        settings = self.settings
        stage = _title("timing", name, f"T = {temperature:g}, batch {batch}")
        requests = self.requests(temperature, timed=True)
        batches = list(timing_batches(requests, settings.timing_prompts, batch))

        def progress(done: int, total: int) -> None:
            self.monitor.progress(stage, done * batch, total * batch)

        started = time.perf_counter()
        with one_thread(self.target.device):
            runs = time_in_turn(engines, batches, progress)
        before = time.perf_counter() - started - sum(run.wall_s for run in runs.values())
        self.monitor.say(f"{stage}: {before:.0f} s of compiling and warm-up are not in the times")
        return runs

    def add_timings(
        self,
        results: EngineResults,
        runs: Mapping[DecodingConfig, TimedRun],
        temperature: float,
        batch: int,
    ) -> None:
        """Add the times of all configurations at one batch to the results.

        Those of a configuration that did not decode the suite are probes.
        """
        distinct = len(self.suite.prompts)
        plain = Decoded.of(runs[PLAIN_DECODING].generations, distinct)
        counted = {config: results.generations.get((temperature, config)) for config in runs}
        known = {}
        for config, run in runs.items():
            answers = {g.id: g for g in counted[config] or ()}
            one = timing(
                run,
                runs[PLAIN_DECODING] if config != PLAIN_DECODING else None,
                batch=batch,
                counted=[answers[id_] for id_, _ in self.timed_prompts] if answers else None,
                distinct=distinct,
            )
            if one is not None:
                known[config] = one
        for config, one in without_disturbed(known).items():
            key = temperature, config
            if counted[config] is not None:
                results.timings.setdefault(key, []).append(one)
                base = plain if one.baseline_tpot_ms and not one.disturbance else None
                decoded = Decoded.of(runs[config].generations, distinct)
                results.steps.setdefault(key, (decoded, base))
            elif config.head:
                conditions = self.suite.name, results.engine, config.head.name, temperature
                results.probes.append(Probe(*conditions, config.draft_probs, config.k, one))


OWN_ENGINE = "draftlab"
"""Name of draftlab's engine in rows."""


def new_engine(
    workload: Workload, config: DecodingConfig, batch: int, pool: PagedCache, *, expect: bool
) -> Decoder:
    """Return an engine for a configuration.

    Args:
        batch: requests decoded at once.
        pool: the KV cache that all engines share.
        expect: whether to compute expected acceptance, and with `calibrate` each draft's
            confidence; a step is slightly cheaper without them.
    """
    target, settings, drafter = workload.target, workload.settings, None
    if config.head is not None:
        drafter = new_drafter(
            config.head.head,
            config.k,
            draft_probs=config.draft_probs,
            verification=settings.verification,
            confidence=settings.calibrate and expect,
        )
    return Engine(
        target,
        drafter,
        batch=batch,
        max_length=workload.max_length,
        cache=pool,
        expect=expect,
        cpu_prepacked=settings.packed,
    )


def shared_pool(workload: Workload) -> PagedCache:
    """Return a KV cache for all engines, which take turns.

    CUDA graphs hold its addresses, so it stays while any engine lives. The draft KV caches, of a
    layer or a few, are each engine's own.
    """
    settings = workload.settings
    timed = settings.timing_batches if settings.timing_prompts else ()
    extra = _extra_configs(workload, settings.temperatures[0])
    alive = dict.fromkeys(workload.configs + extra)
    return new_kv_pool(
        workload.target,
        batch=max((workload.batch, *timed)),
        max_length=workload.max_length,
        draft_bytes=sum(draft_kv_bytes(config.head.head) for config in alive if config.head),
        monitor=workload.monitor,
    )


def measure_draftlab(workload: Workload) -> EngineResults:
    """Decode and time every configuration with draftlab's engine."""
    settings = workload.settings
    results = EngineResults(OWN_ENGINE, package_version())
    pool = shared_pool(workload)
    for config in workload.configs:
        engine = new_engine(workload, config, workload.batch, pool, expect=True)
        workload.decode(results, engine, config)
    for batch in settings.timing_batches if settings.timing_prompts else ():
        _time_batch(workload, results, batch, pool)
    return results


def _time_batch(workload: Workload, results: EngineResults, batch: int, pool: PagedCache) -> None:
    """Time every configuration at one batch size; add timings and probes to the results."""
    first = workload.settings.temperatures[0]
    extra = _extra_configs(workload, first)
    engines = {
        config: new_engine(workload, config, batch, pool, expect=False)
        for config in workload.configs + extra
    }
    for t in workload.settings.temperatures:
        configs = workload.configs_at(t) + (extra if t == first else [])
        runs = workload.time({c: engines[c] for c in configs}, t, batch, results.engine)
        workload.add_timings(results, runs, t, batch)


def _extra_configs(workload: Workload, temperature: float) -> list[DecodingConfig]:
    """Return further K's to time for the adviser, for each head."""
    extra = []
    for head in workload.heads:
        configs = [c for c in workload.configs_at(temperature) if c.head is head]
        more = more_ks({config.k for config in configs})
        extra += [replace(configs[0], k=k) for k in sorted(more)]
    return extra
