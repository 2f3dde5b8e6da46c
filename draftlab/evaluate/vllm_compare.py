"""An installed vLLM measured beside draftlab's engine: the same prompts, heads and arms.

Each arm is a vLLM of its own, started once, counted and timed. So vLLM's arms cannot take turns,
and a machine whose speed drifts blurs its speed-ups more than draftlab's.
"""

from __future__ import annotations

from draftlab.errors import UserError
from draftlab.evaluate.grid import Arm
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import Timed
from draftlab.evaluate.workload import Measured, Work
from draftlab.vllm.engine import VllmEngine, positions
from draftlab.vllm.process import find_python


def check_settings(settings: EvalSettings) -> None:
    """Refuses what vLLM could not measure, before draftlab's engine has spent minutes.

    Raises:
        UserError: settings that vLLM has not, or no vLLM.
    """
    asked = {"draft_temperature": settings.draft_temperature, "greedy_below": settings.greedy_below}
    foreign = [f"{name} = {value:g}" for name, value in asked.items() if value]
    if foreign:
        raise UserError(
            f"expected settings that vLLM has too, found {' and '.join(foreign)}",
            where="engine = vllm",
            do="leave them out (vLLM drafts at the request's temperature), or measure without vLLM",
        )
    find_python(settings.vllm)


def measure_vllm(work: Work) -> Measured:
    """Counts and times every arm with vLLM.

    Raises:
        UserError: a vLLM that does not start, or cannot do what is asked.
    """
    settings = work.settings
    found = Measured("vllm", "")
    times: dict[tuple[float, int], dict[Arm, Timed]] = {}
    requests = [r for timed in (False, True) for r in work.requests(0.0, timed=timed)]
    for arm in work.arms:
        with VllmEngine(
            work.target.folder,
            arm.head.folder if arm.head else None,
            k=arm.k,
            draft_probs=arm.draft_probs,
            dtype=work.target.dtype,
            device=work.target.device,
            batch=max(work.batch, *settings.timing_batches),
            max_length=positions(requests, arm.k, work.target.max_length),
            settings=settings.vllm,
            monitor=work.monitor,
        ) as engine:
            found.version = engine.version
            found.engine = engine.name.replace(f" {engine.version}", "", 1)
            for text in engine.corrections:
                if f"corrected: {text}" not in found.warnings:
                    found.warnings.append(f"corrected: {text}")
            work.count(found, engine, arm)
            for temperature in settings.temperatures:
                if settings.timing_prompts and arm in work.arms_at(temperature):
                    for batch in settings.timing_batches:
                        timed = work.time({arm: engine}, temperature, batch, found.engine)
                        times.setdefault((temperature, batch), {}).update(timed)
    for (temperature, batch), timed in times.items():
        for arm in timed:
            if measured := work.timing(timed, arm, batch):
                found.timings.setdefault((temperature, arm), []).append(measured)
    return found
