"""Metrics of a load pass: goodput by Little's law, percentiles of TPOT and TTFT, intervals.

Goodput is output tokens per second of wall time while the load is steady. With L requests running
on average, each of which takes W seconds for n tokens,

    goodput = L · Σ n / Σ W

over the measured requests (methods §6.2). They are consecutive admissions, not those that happened
to finish in a window, so long and short answers are represented alike, and no token is cut at the
edge of a window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.decoding_config import DecodingConfig
from draftlab.evaluate.load import LoadRun
from draftlab.evaluate.results import LoadPoint, Percentiles
from draftlab.intervals import (
    prompt_interval,
    quantile_intervals,
    ratio_interval,
    resample_sums,
    sums_by_prompt,
)

QUANTILES = (0.5, 0.9, 0.99)
FEW_RUNNING = 0.97
"""A smaller share of the wanted requests at once is a warning."""


def load_point(
    run: LoadRun,
    plain: LoadRun | None,
    config: DecodingConfig,
    *,
    engine: str,
    temperature: float,
    concurrency: int,
) -> LoadPoint:
    """Return the metrics of one configuration at one temperature and concurrency.

    Intervals resample prompts, all requests of one together.

    Args:
        run: what it decoded.
        plain: plain decoding of the same streams, for the ratio of goodputs.
        engine: its name.
    """
    measured = run.measured
    prompts = np.array(run.prompts)
    tokens, seconds = _tokens_and_seconds(run)
    later = np.array([_after_first(g) for g in measured])
    later_tokens, later_s, steps = sums_by_prompt(prompts, *later.T)
    counters = Counters.total(g.counters for g in measured)
    running = run.mean_running
    decoding = [i for i, g in enumerate(measured) if len(g.token_ids) > 1]
    decodes = bool(later_tokens.sum() and later_s.sum())
    point = LoadPoint(
        engine=engine,
        configuration=config.name_at(temperature),
        head=config.head.name if config.head else None,
        k=config.k,
        draft_probs=config.draft_probs,
        temperature=temperature,
        concurrency=concurrency,
        requests=len(measured),
        output_tokens=int(tokens.sum()),
        mean_running=running,
        goodput_tok_s=running * tokens.sum() / seconds.sum(),
        goodput_tok_s_ci=_scaled(ratio_interval(tokens, seconds), running),
        user_tok_s=later_tokens.sum() / later_s.sum() if decodes else None,
        user_tok_s_ci=ratio_interval(later_tokens, later_s) if decodes else None,
        tpot_ms=_percentiles(
            [1e3 * (measured[i].tpot_s or 0.0) for i in decoding], prompts[decoding]
        ),
        ttft_ms=_percentiles([1e3 * g.first_token_s for g in measured], prompts),
        step_ms=1e3 * later_s.sum() / steps.sum() if steps.sum() else None,
        tokens_per_step=later_tokens.sum() / steps.sum() if steps.sum() else None,
        acceptance_length=counters.acceptance_length,
        acceptance_at=counters.acceptance_at,
        warnings=_warnings(running, concurrency),
    )
    if plain is None:
        return point
    if plain.prompts != run.prompts:
        raise ValueError("expected plain decoding of the same streams")
    plain_tokens, plain_s = _tokens_and_seconds(plain)
    factor = running / plain.mean_running
    resampled = resample_sums(tokens, seconds, plain_tokens, plain_s)
    ratios = factor * (resampled[0] / resampled[1]) / (resampled[2] / resampled[3])
    ratio = factor * (tokens.sum() / seconds.sum()) / (plain_tokens.sum() / plain_s.sum())
    return point.model_copy(
        update={"speedup": float(ratio), "speedup_ci": prompt_interval(ratios, len(tokens))}
    )


def _tokens_and_seconds(run: LoadRun) -> list[np.ndarray]:
    """Return the output tokens and the seconds of each prompt's measured requests, [P] each."""
    tokens = [len(g.token_ids) for g in run.measured]
    return sums_by_prompt(run.prompts, tokens, [g.total_s for g in run.measured])


def _after_first(generation: Generation) -> tuple[float, float, float]:
    """Return a request's tokens, seconds and steps after its first token."""
    tokens = len(generation.token_ids) - 1
    if tokens < 1:
        return 0.0, 0.0, 0.0
    return tokens, generation.total_s - generation.first_token_s, len(generation.steps)


def _percentiles(values: Sequence[float], prompts: np.ndarray) -> Percentiles | None:
    """Return percentiles of the requests' times with intervals over prompts; None without any."""
    if not values:
        return None
    points = np.quantile(values, QUANTILES)
    intervals = quantile_intervals(np.array(values), prompts, QUANTILES)
    names = [f"p{round(100 * q)}" for q in QUANTILES]
    return Percentiles.model_validate(
        {"mean": float(np.mean(values))}
        | dict(zip(names, map(float, points), strict=True))
        | {f"{name}_ci": ci for name, ci in zip(names, intervals, strict=True)}
    )


def _scaled(interval: tuple[float, float] | None, factor: float) -> tuple[float, float] | None:
    return interval and (interval[0] * factor, interval[1] * factor)


def _warnings(running: float, concurrency: int) -> list[str]:
    if running >= FEW_RUNNING * concurrency:
        return []
    return [
        f"at concurrency {concurrency} only {running:.1f} requests ran at once on average: the KV "
        "cache holds no more, or the machine is busy with other programs"
    ]
