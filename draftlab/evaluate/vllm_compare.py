"""Measurement of an installed vLLM with the prompts, heads and configurations of draftlab's engine.

Every configuration has its own vLLM, which is started once and then decodes the suite and the timed
prompts. So the configurations cannot alternate, and a machine whose speed drifts adds more noise to
vLLM's speed-ups than to draftlab's.
"""

from __future__ import annotations

from collections.abc import Iterable

from draftlab.errors import UserError
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import TimedRun
from draftlab.evaluate.workload import EngineResults, Workload
from draftlab.heads.config import HeadConfig
from draftlab.heads.vllm_config import native_config
from draftlab.servers.vllm_engine import VllmEngine, required_positions
from draftlab.servers.vllm_process import find_python


def check_settings(settings: EvalSettings) -> None:
    """Check that vLLM can measure with these settings, before draftlab's engine spends minutes.

    Raises:
        UserError: vLLM lacks block verification, or no vLLM is installed.
    """
    if settings.verification == "block":
        raise UserError(
            "expected settings that vLLM has too, found verification = block",
            where="engine = vllm",
            do="leave it out (vLLM verifies token by token), or measure without vLLM",
        )
    find_python()


def check_heads(configs: Iterable[HeadConfig]) -> None:
    """Check that vLLM can load the folders of heads; raise a `UserError` otherwise."""
    for config in configs:
        if not native_config(config, "float32"):
            raise UserError(
                f"expected heads whose folders vLLM loads, found one of {config.family}",
                where="engine = vllm",
                do="measure without vLLM; `draftlab bench` measures a server with the export",
            )


def measure_vllm(workload: Workload) -> EngineResults:
    """Decode and time every configuration with vLLM.

    Raises:
        UserError: vLLM does not start, or cannot decode the configuration.
    """
    settings = workload.settings
    results = EngineResults("vllm", "")
    runs: dict[tuple[float, int], dict[DecodingConfig, TimedRun]] = {}
    requests = [r for timed in (False, True) for r in workload.requests(0.0, timed=timed)]
    for config in workload.configs:
        with VllmEngine(
            workload.target.folder,
            config.head.folder if config.head else None,
            k=config.k,
            draft_probs=config.draft_probs,
            dtype=workload.target.dtype,
            device=workload.target.device,
            batch=max(workload.batch, *settings.timing_batches),
            max_length=required_positions(requests, config.k, workload.target.max_length),
            settings=settings.vllm,
            monitor=workload.monitor,
        ) as engine:
            results.version = engine.version
            results.engine = engine.name.replace(f" {engine.version}", "", 1)
            for text in engine.corrections:
                if f"corrected: {text}" not in results.warnings:
                    results.warnings.append(f"corrected: {text}")
            workload.decode(results, engine, config)
            for t in settings.temperatures if settings.timing_prompts else ():
                if config in workload.configs_at(t):
                    for batch in settings.timing_batches:
                        run = workload.time({config: engine}, t, batch, results.engine)
                        runs.setdefault((t, batch), {}).update(run)
    for (t, batch), by_config in runs.items():
        workload.add_timings(results, by_config, t, batch)
    return results
