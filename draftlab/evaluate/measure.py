"""Measurement with draftlab's own engines: decode the suite, then time every configuration."""

from __future__ import annotations

from dataclasses import replace

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.evaluate.adviser import StepTime
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.timing import Decoder
from draftlab.evaluate.workload import EngineResults, Workload
from draftlab.version import package_version

ENGINE_NAMES = {"paged": "draftlab", "reference": "draftlab-reference", "vllm": "draftlab"}
"""Engine name in rows, by setting; "vllm" also measures the paged engine."""


def new_engine(workload: Workload, config: DecodingConfig, batch: int, *, expect: bool) -> Decoder:
    """Return an engine for a configuration.

    Args:
        batch: requests decoded at once.
        expect: whether to compute expected acceptance; a step is slightly cheaper without it.
    """
    target, settings, drafter = workload.target, workload.settings, None
    if config.head is not None:
        drafter = new_drafter(
            config.head.head,
            config.k,
            draft_probs=config.draft_probs,
            draft_temperature=settings.draft_temperature,
            greedy_below=settings.greedy_below,
        )
    size = {"batch": batch, "max_length": workload.max_length}
    if settings.engine == "reference":
        return ReferenceEngine(target, drafter, **size)
    return Engine(target, drafter, **size, expect=expect, cpu_prepacked=settings.packed)


def measure_draftlab(workload: Workload) -> EngineResults:
    """Decode and time every configuration with draftlab's engine."""
    settings = workload.settings
    results = EngineResults(ENGINE_NAMES[settings.engine], package_version())
    for config in workload.configs:
        workload.decode(results, new_engine(workload, config, workload.batch, expect=True), config)
    for batch in settings.timing_batches if settings.timing_prompts else ():
        _time_batch(workload, results, batch)
    return results


def _time_batch(workload: Workload, results: EngineResults, batch: int) -> None:
    """Time every configuration at one batch size; add timings and step times to the results."""
    first = workload.settings.temperatures[0]
    extra = _extra_configs(workload, first)
    engines = {
        config: new_engine(workload, config, batch, expect=False)
        for config in workload.configs + extra
    }
    for t in workload.settings.temperatures:
        configs = workload.configs_at(t) + (extra if t == first else [])
        runs = workload.time({c: engines[c] for c in configs}, t, batch, results.engine)
        for config in configs:
            timing = workload.timing(runs, config, batch)
            if timing is None:
                continue
            if config not in extra:
                results.timings.setdefault((t, config), []).append(timing)
            main_mode = config.draft_probs == (workload.settings.draft_probs == "on")
            if config.head and t == first and main_mode and timing.step_ms:
                results.step_times.append(
                    StepTime(results.engine, config.head.name, batch, config.k, timing.step_ms)
                )


def _extra_configs(workload: Workload, temperature: float) -> list[DecodingConfig]:
    """Return K = 1 for each head that is not measured there, so that the adviser interpolates."""
    extra = []
    for head in workload.heads:
        configs = [c for c in workload.configs_at(temperature) if c.head is head]
        if all(config.k > 1 for config in configs):
            extra.append(replace(configs[0], k=1))
    return extra
