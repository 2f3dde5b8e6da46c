"""Evaluation: real speculative decoding of a prompt suite, counted and timed.

Counters come from decoding the whole suite in batches. Times come from a second pass over a few
prompts (`evaluate/timing.py`). Every head, K, temperature and drafter setting gives a row
(`evaluate/grid.py`); plain decoding is decoded once a temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from typing import Any

from draftlab.engine.drafter import new_drafter
from draftlab.engine.engine import Engine
from draftlab.engine.reference import ReferenceEngine
from draftlab.errors import UserError
from draftlab.evaluate.adviser import StepPoint, advise
from draftlab.evaluate.bandwidth import copy_rate
from draftlab.evaluate.grid import PLAIN, Arm, NamedHead
from draftlab.evaluate.metrics import counted_figures, device_name, environment, equality, row_times
from draftlab.evaluate.results import Lossless, Report, Row
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.timing import Decoder
from draftlab.evaluate.warnings import depth_warnings, row_warnings, suite_warnings
from draftlab.evaluate.workload import Measured, Work
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import products
from draftlab.text.suites import Suite

__all__ = ["EvalSettings", "Evaluator", "NamedHead", "Suite", "environment", "new_engine"]

ENGINES = {"paged": "draftlab", "reference": "draftlab-reference", "vllm": "draftlab"}
"""What rows call the engine of each setting; "vllm" puts its rows beside those of "paged"."""


def new_engine(
    target: Target, arm: Arm, settings: EvalSettings, *, batch: int, max_length: int, expect: bool
) -> Decoder:
    """The engine that decodes as an arm says.

    Args:
        batch: requests decoded at once.
        max_length: positions of a request.
        expect: whether expected acceptance is wanted; without it a step is a little cheaper.
    """
    drafter = None
    if arm.head is not None:
        drafter = new_drafter(
            arm.head.head,
            arm.k,
            draft_probs=arm.draft_probs,
            draft_temperature=settings.draft_temperature,
            greedy_below=settings.greedy_below,
        )
    if settings.engine == "reference":
        return ReferenceEngine(target, drafter, batch=batch, max_length=max_length)
    return Engine(
        target, drafter, batch=batch, max_length=max_length, expect=expect, packed=settings.packed
    )


def measure_own(work: Work) -> Measured:
    """Counts and times every cell with draftlab's engine."""
    settings, found = (
        work.settings,
        Measured(ENGINES[work.settings.engine], metadata.version("draftlab")),
    )

    def engine(arm: Arm, batch: int, expect: bool) -> Decoder:
        return new_engine(
            work.target, arm, settings, batch=batch, max_length=work.max_length, expect=expect
        )

    for arm in work.arms:
        work.count(found, engine(arm, work.batch, True), arm)
    first = settings.temperatures[0]
    probes = _probe_arms(work, first)
    for batch in settings.timing_batches if settings.timing_prompts else ():
        engines = {arm: engine(arm, batch, False) for arm in work.arms + probes}
        for t in settings.temperatures:
            asked = work.arms_at(t) + (probes if t == first else [])
            timed = work.time({arm: engines[arm] for arm in asked}, t, batch, found.engine)
            for arm in asked:
                measured = work.timing(timed, arm, batch)
                if measured is None:
                    continue
                if arm not in probes:
                    found.timings.setdefault((t, arm), []).append(measured)
                one_way = arm.draft_probs == (settings.draft_probs == "on")
                if arm.head and t == first and one_way and measured.step_ms:
                    found.probes.append(
                        StepPoint(found.engine, arm.head.name, batch, arm.k, measured.step_ms)
                    )
    return found


def _probe_arms(work: Work, temperature: float) -> list[Arm]:
    """K = 1 of each head that is not measured there: the adviser then need not extrapolate."""
    found = []
    for head in work.heads:
        own = [arm for arm in work.arms_at(temperature) if arm.head is head]
        if all(arm.k > 1 for arm in own):
            found.append(replace(own[0], k=1))
    return found


class Evaluator:
    """Evaluates heads on one suite.

    Args:
        target: the model.
        heads: what drafts; without any, plain decoding is measured.
        suite: the prompts.
        stop_ids: tokens that end an answer.
        settings: how.
        monitor: for lines and progress.
    """

    def __init__(
        self,
        target: Target,
        heads: Sequence[NamedHead],
        suite: Suite,
        stop_ids: frozenset[int],
        settings: EvalSettings,
        *,
        monitor: Monitor,
    ) -> None:
        taken = suite.prompts[: settings.max_prompts]
        if not taken:
            raise UserError("expected prompts to evaluate, found none", where=suite.name)
        self.work = Work(
            target, tuple(heads), replace(suite, prompts=taken), stop_ids, settings, monitor
        )
        self.warnings = suite_warnings(len(taken), settings)
        self._say_what(len(suite.prompts))

    def _say_what(self, offered: int) -> None:
        """What will be decoded, before it takes its time."""
        work, settings, taken = self.work, self.work.settings, len(self.work.suite.prompts)
        depths = sorted({arm.k for arm in work.arms} - {0})
        work.monitor.say(
            f"eval: {taken:,} of {offered:,} prompts of {work.suite.name}, up to "
            f"{settings.max_new_tokens:,} tokens each; "
            f"T = {', '.join(f'{t:g}' for t in settings.temperatures)}; "
            + (f"K = {', '.join(map(str, depths))}" if depths else "no drafting")
        )
        if used := self._products():
            work.monitor.say(f"eval: {used}")
        for text in self.warnings:
            work.monitor.say(f"warning: {text}")
        for head in work.heads:
            for text in (text for k in head.depths(settings) for text in depth_warnings(head, k)):
                work.monitor.say(f"warning: {head.name}: {text}")

    def run(self) -> Report:
        """Counts every cell of the grid, times it, and advises on K."""
        work, device = self.work, self.work.target.device
        measured = [measure_own(work)]
        if work.settings.engine == "vllm":
            from draftlab.evaluate.vllm_compare import measure_vllm

            measured.append(measure_vllm(work))
        rows = [
            self._row(one, t, arm)
            for one in measured
            for t in work.settings.temperatures
            for arm in work.arms_at(t)
        ]
        certificates = self._certify()
        stretches = {one.name: one.stretches for one in work.heads if one.stretches}
        rows = [_certified(row, certificates) for row in rows]
        for row in rows:
            for text in row_warnings(row):
                probs = ", draft probs on" if row.draft_probs else ""
                name = f"T = {row.temperature:g}, {row.head}, K = {row.k}{probs}"
                work.monitor.say(f"warning: {name}: {text}")
        return Report(
            target=self._target(),
            environment=environment(device)
            | {"timing": self._timing_conditions()}
            | ({"products": used} if (used := self._products()) else {})
            | ({"certificates": certificates} if certificates else {})
            | ({"alpha_by_position": stretches} if stretches else {}),
            adviser=advise(rows, [probe for one in measured for probe in one.probes]),
            rows=rows,
        )

    def _products(self) -> str | None:
        """Which products the engine runs on; None where there is no choice."""
        target, settings = self.work.target, self.work.settings
        if target.device.type != "cpu" or settings.engine == "reference":
            return None
        return products(target, packed=settings.packed)

    def _certify(self) -> dict[str, dict[str, Any]]:
        """Each head's certificate, by its name; its lines are printed."""
        work, found = self.work, {}
        if not work.settings.certify:
            return found
        from draftlab.evaluate.certificate.certify import CertifySettings, certify

        for head in work.heads:
            certificate = certify(
                work.target,
                head.head,
                work.suite.prompts,
                work.stop_ids,
                CertifySettings(seed=work.settings.seed),
                k=max(head.depths(work.settings)),
                monitor=work.monitor,
                engine=ReferenceEngine
                if work.settings.engine == "reference"
                else partial(Engine, packed=work.settings.packed),
            )
            for line in certificate.lines:
                work.monitor.say(f"certificate of {head.name}: {line}")
            found[head.name] = certificate.model_dump(mode="json")
        return found

    def _target(self) -> dict[str, Any]:
        target = self.work.target
        return {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "architecture": type(target.model).__name__,
            "num_layers": target.num_layers,
            "hidden_size": target.config.hidden_size,
            "parameters": sum(p.numel() for p in target.model.parameters()),
        }

    def _timing_conditions(self) -> dict[str, Any] | None:
        """Conditions of the times, which are not those of the counters."""
        settings, device = self.work.settings, self.work.target.device
        if not settings.timing_prompts:
            return None
        rate = copy_rate(device)
        return {
            "batch": " / ".join(map(str, settings.timing_batches)),
            "prompts": settings.timing_prompts,
            "tokens": settings.timing_tokens,
            "threads": 1 if device.type == "cpu" else None,
            "stop_tokens": "ignored",
            "copy_rate_gb_s": rate and round(rate / 1e9, 1),
        }

    def _row(self, found: Measured, temperature: float, arm: Arm) -> Row:
        work, settings, head, cell = self.work, self.work.settings, arm.head, (temperature, arm)
        greedy, dtype = temperature == 0, work.target.dtype
        generations, plain = found.counted[cell], found.counted[temperature, PLAIN]
        row = Row(
            head=head.name if head else None,
            engine=found.engine,
            engine_version=found.version,
            device=device_name(work.target.device),
            dtype=str(dtype).removeprefix("torch."),
            batch=work.batch,
            suite=work.suite.name,
            suite_sha256=work.suite.sha256,
            template=work.suite.template_sha256,
            max_new_tokens=settings.max_new_tokens,
            seed=settings.seed,
            drafter=head.drafter if head else "none",
            k=arm.k,
            k_trained=head.k_trained if head else None,
            temperature=temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            draft_temperature=settings.draft_temperature if head else None,
            draft_probs=arm.draft_probs,
            **counted_figures(generations, greedy=greedy),
            **row_times(found.timings.get(cell, [])),
            **(equality(generations, plain, dtype) if head and greedy else {}),
            warnings=[
                *(self.warnings + depth_warnings(head, arm.k) if head else []),
                *found.warnings,
            ],
        )
        return row.model_copy(update={"warnings": row.warnings + row_warnings(row)})


def _certified(row: Row, certificates: dict[str, dict[str, Any]]) -> Row:
    """The row with its head's certificate, where its own tokens prove nothing: at T > 0."""
    found = certificates.get(row.head or "")
    if not found or row.temperature == 0 or row.engine not in ENGINES.values():
        return row
    fields = {key: found[key] for key in ("level", "test", "p_value", "n")}
    warnings = [] if found["passed"] else [f"certificate failed: {'; '.join(found['faults'])}"]
    return row.model_copy(
        update={"lossless": Lossless(**fields), "warnings": row.warnings + warnings}
    )
