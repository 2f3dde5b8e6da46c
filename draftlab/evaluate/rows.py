"""The rows of a report from what the engines measured on a suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftlab.engine.sampling import Generation
from draftlab.evaluate.decoding_config import PLAIN_DECODING, DecodingConfig
from draftlab.evaluate.metrics import (
    Decoded,
    acceptance_fields,
    device_name,
    equality_fields,
    share_equal,
    speed_fields,
    timing_fields,
)
from draftlab.evaluate.results import CategoryResult, Row
from draftlab.evaluate.warnings import (
    k_warnings,
    row_warnings,
    suite_warnings,
    trained_prompt_warnings,
)
from draftlab.evaluate.workload import EngineResults, Workload

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
        own_warnings += trained_prompt_warnings(head, workload.suite)
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
        draft_temperature=settings.draft_temperature if head else None,
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
    by_category: dict[str, list[Generation]] = {}
    for one in results.generations[temperature, config] if categories else ():
        by_category.setdefault(categories.get(one.id, WITHOUT_CATEGORY), []).append(one)
    steps = results.steps.get((temperature, config))
    found = []
    for name, generations in by_category.items():
        fields: dict[str, Any] = acceptance_fields(generations, greedy=True, rows=1)
        own = Decoded.of(generations)
        if steps is not None and own.tokens.sum():
            fields |= speed_fields(steps[0], own, steps[1], paired=False)
        known = CategoryResult.model_fields.keys() & fields.keys()
        found.append(CategoryResult(category=name, **{key: fields[key] for key in known}))
    return found
