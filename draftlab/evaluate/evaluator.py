"""Evaluation: speculative decoding of a prompt suite, with counters and times.

The counters come from decoding the whole suite in batches. The times come from a second pass over a
few prompts (`evaluate/timing.py`). Every head, K, temperature and drafter setting gives a row
(`evaluate/decoding_config.py`); plain decoding runs once per temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from draftlab.engine.engine import Engine
from draftlab.engine.sampling import Generation
from draftlab.errors import UserError
from draftlab.evaluate.adviser import advise
from draftlab.evaluate.calibration.calibrate import calibrate_rows
from draftlab.evaluate.certificate.result import Sampled
from draftlab.evaluate.decoding_config import PLAIN_DECODING, DecodingConfig, NamedHead
from draftlab.evaluate.metrics import (
    Decoded,
    acceptance_fields,
    device_name,
    environment,
    equality_fields,
    share_equal,
    speed_fields,
    timing_fields,
)
from draftlab.evaluate.results import CategoryResult, Lossless, Report, Row
from draftlab.evaluate.settings import EvalSettings
from draftlab.evaluate.warnings import (
    head_warnings,
    k_warnings,
    row_warnings,
    suite_warnings,
)
from draftlab.evaluate.workload import OWN_ENGINE, EngineResults, Workload, measure_draftlab
from draftlab.files import known_sha256
from draftlab.heads.folder import WEIGHTS
from draftlab.progress import Monitor
from draftlab.target_model.model import Target
from draftlab.target_model.prepacked_decoder import describe_products
from draftlab.text.suites import Suite

__all__ = ["EvalSettings", "Evaluator", "NamedHead", "Suite", "environment"]


class Evaluator:
    """The evaluation of heads on one or several suites.

    Args:
        target: the target model.
        heads: heads to draft with; without any, only plain decoding is measured.
        suites: the prompts; each suite has rows of its own.
        stop_ids: tokens that end an answer.
        settings: what to decode and how.
        monitor: receiver of messages and progress.
    """

    def __init__(
        self,
        target: Target,
        heads: Sequence[NamedHead],
        suites: Suite | Sequence[Suite],
        stop_ids: frozenset[int],
        settings: EvalSettings,
        *,
        monitor: Monitor,
    ) -> None:
        self.workloads: list[Workload] = []
        self.vllm_failure: str | None = None
        for suite in [suites] if isinstance(suites, Suite) else suites:
            chosen = suite.by_length() if settings.by_length else suite
            drawn = chosen.sample(settings.max_prompts, settings.seed)
            workload = Workload(target, tuple(heads), drawn, stop_ids, settings, monitor)
            self.workloads.append(workload)
            self._announce(workload, len(suite.prompts))
        self.workload = self.workloads[0]
        if used := self._products():
            monitor.say(f"eval: {used}")
        for head in heads:
            for text in (text for k in head.ks(settings) for text in k_warnings(head, k)):
                monitor.say(f"warning: {head.name}: {text}")

    def _announce(self, workload: Workload, available: int) -> None:
        """Report what will be decoded of a suite of so many prompts, and warnings about it."""
        settings = workload.settings
        ks = sorted({config.k for config in workload.configs} - {0})
        workload.monitor.say(
            f"eval: {len(workload.suite.prompts):,} of {available:,} prompts of "
            f"{workload.suite.name}, up to {settings.max_new_tokens:,} tokens each; "
            f"T = {', '.join(f'{t:g}' for t in settings.temperatures)}; "
            + (f"K = {', '.join(map(str, ks))}" if ks else "no drafting")
        )
        warnings = suite_warnings(len(workload.suite.prompts), settings)
        for head in workload.heads:
            warnings += head_warnings(head, workload.suite)
        for text in warnings:
            workload.monitor.say(f"warning: {text}")

    def run(self) -> Report:
        """Decode and time every configuration, and return the report with advice on K.

        If vLLM fails, the report has draftlab's rows alone, and `vllm_failure` in its environment.
        """
        workload, measured = self.workload, [self._measure(one) for one in self.workloads]
        certificates = self._certify()
        number = sum(len(one.sampled_configs) for one in self.workloads)
        rows, probes, calibrations = [], [], []
        for one, results in zip(self.workloads, measured, strict=True):
            rows += [_with_certificate(row, certificates) for row in new_rows(one, results, number)]
            probes += [probe for engine in results for probe in engine.probes]
            if one.settings.calibrate:
                calibrations += calibrate_rows(one, results[0])
        optional = {
            "heads": {
                head.name: known_sha256(head.folder / WEIGHTS)
                for head in workload.heads
                if head.folder is not None
            },
            "products": self._products(),
            "vllm_failure": self.vllm_failure,
            "certificates": certificates,
        }
        return Report(
            target=self._target(),
            environment=environment(workload.target.device)
            | {"timing": self._timing_conditions()}
            | {name: value for name, value in optional.items() if value},
            adviser=advise(rows, probes),
            rows=rows,
            calibrations=calibrations,
        )

    def _measure(self, workload: Workload) -> list[EngineResults]:
        """Decode and time a suite with draftlab's engine, and with vLLM if it is wanted."""
        results = [measure_draftlab(workload)]
        if workload.settings.engine == "vllm" and self.vllm_failure is None:
            from draftlab.evaluate.vllm_compare import measure_vllm

            try:
                results.append(measure_vllm(workload))
            except UserError as error:  # draftlab's rows may have taken hours
                self.vllm_failure = error.what
        return results

    def _products(self) -> str | None:
        """Return which matrix products the engine uses; None where there is no choice."""
        target = self.workload.target
        if target.device.type != "cpu":
            return None
        return describe_products(target, cpu_prepacked=self.workload.settings.packed)

    def _certify(self) -> dict[str, dict[str, Any]]:
        """Return each head's certificate by name, if `certify` is set; print its lines."""
        workload, certificates = self.workload, {}
        if not workload.settings.certify:
            return certificates
        from draftlab.evaluate.certificate.certify import Certification, CertifySettings

        settings, sampled = workload.settings, workload.sampled_configs
        size = CertifySettings(seed=settings.seed, num_rows=len(sampled))
        engine = partial(Engine, cpu_prepacked=settings.packed)
        same = workload.stop_ids, size, workload.monitor, engine
        for head in workload.heads:
            rows = [self._sampled(t, config) for t, config in sampled if config.head is head]
            certificate = Certification(workload.target, head.head, *same).run(
                self._prompts_in_turn(), max(head.ks(settings)), rows
            )
            for line in certificate.lines:
                workload.monitor.say(f"certificate of {head.name}: {line}")
            certificates[head.name] = certificate.model_dump(mode="json")
        return certificates

    def _prompts_in_turn(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the prompts of all suites, in turn: a certificate takes the first of them."""
        named = [
            [(f"{one.suite.name} {id_}", ids) for id_, ids in one.suite.prompts]
            for one in self.workloads
        ]
        return [prompt for turn in zip_longest(*named) for prompt in turn if prompt]

    def _sampled(self, temperature: float, config: DecodingConfig) -> Sampled:
        """Return how a row at T > 0 is sampled."""
        settings = self.workload.settings
        return Sampled(
            temperature=temperature,
            k=config.k,
            draft_probs=config.draft_probs,
            top_k=settings.top_k,
            top_p=settings.top_p,
            verification=settings.verification if config.draft_probs else "token",
        )

    def _target(self) -> dict[str, Any]:
        target = self.workload.target
        return {
            "name": target.name,
            "fingerprint": target.fingerprint,
            "architecture": type(target.model).__name__,
            "num_layers": target.num_layers,
            "hidden_size": target.config.hidden_size,
            "parameters": sum(p.numel() for p in target.model.parameters()),
        }

    def _timing_conditions(self) -> dict[str, Any] | None:
        """Return the conditions of the times, which differ from those of the counters."""
        settings, device = self.workload.settings, self.workload.target.device
        if not settings.timing_prompts:
            return None
        prompts = max(len(one.suite.prompts) for one in self.workloads)
        return {
            "batch": " / ".join(map(str, settings.timing_batches)),
            "prompts": min(settings.timing_prompts, prompts),
            "tokens": settings.timing_tokens,
            "threads": 1 if device.type == "cpu" else None,
            "stop_tokens": "end an answer",
        }


def _with_certificate(row: Row, certificates: dict[str, dict[str, Any]]) -> Row:
    """Return the row with the test of its own sampling, if it has one.

    At T = 0 tokens are compared with plain decoding's in every row.
    """
    certificate = certificates.get(row.head or "")
    if not certificate or row.temperature == 0 or row.engine != OWN_ENGINE:
        return row
    conditions = (row.temperature, row.k, row.draft_probs)
    lossless = next(
        (
            Lossless(**{name: arm[name] for name in ("level", "test", "p_value", "n")})
            for arm in certificate["arms"]
            if (arm["temperature"], arm["k"], arm["draft_probs"]) == conditions
        ),
        None,
    )
    faults = "; ".join(certificate["faults"])
    warnings = [] if certificate["passed"] else [f"certificate failed: {faults}"]
    return row.model_copy(update={"lossless": lossless, "warnings": row.warnings + warnings})


WITHOUT_CATEGORY = "other"


def new_rows(workload: Workload, results: Sequence[EngineResults], tested: int) -> list[Row]:
    """Return a row for each engine, temperature and configuration.

    Args:
        results: of each engine, draftlab's first.
        tested: rows of the report whose self-checks share one level.
    """
    return [
        _row(workload, one, t, config, results[0], tested)
        for one in results
        for t in workload.settings.temperatures
        for config in workload.configs_at(t)
    ]


def _row(
    workload: Workload,
    results: EngineResults,
    temperature: float,
    config: DecodingConfig,
    draftlab: EngineResults,
    tested: int,
) -> Row:
    settings, head = workload.settings, config.head
    greedy, dtype = temperature == 0, workload.target.dtype
    generations = results.generations[temperature, config]
    plain = results.generations[temperature, PLAIN_DECODING]
    own_warnings = []
    if head is not None:
        own_warnings += suite_warnings(len(workload.suite.prompts), settings)
        own_warnings += head_warnings(head, workload.suite)
        own_warnings += k_warnings(head, config.k)
    row = Row(
        head=head.name if head else None,
        engine=results.engine,
        engine_version=results.version,
        device=device_name(workload.target.device),
        dtype=str(dtype).removeprefix("torch."),
        batch=workload.batch,
        suite=workload.suite.name,
        suite_sha256=workload.suite.sha256,
        template=workload.suite.template_sha256,
        **settings.model_dump(include={"max_new_tokens", "seed", "top_k", "top_p"}),
        drafter=head.drafter if head else "none",
        k_trained=head.k_trained if head else None,
        temperature=temperature,
        draft_probs=config.draft_probs,
        verification=settings.verification if config.draft_probs else "token",
        **acceptance_fields(generations, greedy=greedy, rows=tested),
        **timing_fields(results.timings.get((temperature, config), [])),
        categories=_categories(workload, results, temperature, config) if head else [],
        **(equality_fields(generations, plain, dtype) if head and greedy else {}),
        prompts_equal_draftlab=share_equal(generations, draftlab.generations[temperature, config])
        if greedy and results is not draftlab
        else None,
        warnings=own_warnings + results.warnings,
    )
    return row.model_copy(update={"warnings": row.warnings + row_warnings(row)})


def _categories(
    workload: Workload, results: EngineResults, temperature: float, config: DecodingConfig
) -> list[CategoryResult]:
    """Return the result of each category of the suite, in the suite's order."""
    categories = workload.suite.categories
    by_category: dict[str, list[Generation]] = {name: [] for name in categories.values()}
    for one in results.generations[temperature, config] if categories else ():
        by_category.setdefault(categories.get(one.id, WITHOUT_CATEGORY), []).append(one)
    steps = results.steps.get((temperature, config))
    found = []
    for name, generations in filter(itemgetter(1), by_category.items()):
        fields: dict[str, Any] = acceptance_fields(generations, greedy=True, rows=1)
        own = Decoded.of(generations)
        if steps is not None and own.tokens.sum():
            fields |= speed_fields(steps[0], own, steps[1], paired=False)
        known = CategoryResult.model_fields.keys() & fields.keys()
        found.append(CategoryResult(category=name, **{key: fields[key] for key in known}))
    return found
