"""Measurement with draftlab's own engines: decode the suite, and time every configuration."""

from __future__ import annotations

from dataclasses import replace

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.kv_pool import draft_kv_bytes, new_kv_pool
from draftlab.engine.reference import ReferenceEngine
from draftlab.evaluate.decoding_config import DecodingConfig, more_ks
from draftlab.evaluate.timing import Decoder
from draftlab.evaluate.workload import EngineResults, Workload
from draftlab.target_model.paged_cache import PagedCache
from draftlab.version import package_version

ENGINE_NAMES = {"paged": "draftlab", "reference": "draftlab-reference", "vllm": "draftlab"}
"""Engine name in rows, by setting; "vllm" also measures the paged engine."""


def new_engine(
    workload: Workload, config: DecodingConfig, batch: int, pool: PagedCache | None, *, expect: bool
) -> Decoder:
    """Return an engine for a configuration.

    Args:
        batch: requests decoded at once.
        pool: the KV cache that all paged engines share.
        expect: whether to compute expected acceptance, and with `calibrate` each draft's
            confidence; a step is slightly cheaper without them.
    """
    target, settings, drafter = workload.target, workload.settings, None
    if config.head is not None:
        drafter = new_drafter(
            config.head.head,
            config.k,
            draft_probs=config.draft_probs,
            draft_temperature=settings.draft_temperature,
            verification=settings.verification,
            confidence=settings.calibrate and expect,
        )
    size = {"batch": batch, "max_length": workload.max_length}
    if settings.engine == "reference":
        return ReferenceEngine(target, drafter, **size)
    return Engine(
        target,
        drafter,
        **size,
        cache=pool,
        expect=expect,
        cpu_prepacked=settings.packed,
    )


def shared_pool(workload: Workload) -> PagedCache | None:
    """Return a KV cache for all engines, which take turns; None for the reference engine.

    CUDA graphs hold its addresses, so it stays while any engine lives. The draft KV caches, of a
    layer or a few, are each engine's own.
    """
    settings = workload.settings
    if settings.engine == "reference":
        return None
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
    results = EngineResults(ENGINE_NAMES[settings.engine], package_version())
    pool = shared_pool(workload)
    for config in workload.configs:
        engine = new_engine(workload, config, workload.batch, pool, expect=True)
        workload.decode(results, engine, config)
    for batch in settings.timing_batches if settings.timing_prompts else ():
        _time_batch(workload, results, batch, pool)
    return results


def _time_batch(
    workload: Workload, results: EngineResults, batch: int, pool: PagedCache | None
) -> None:
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
