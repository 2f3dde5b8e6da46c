"""Metrics of generations: the fields of a report row, and the machine they were measured on."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.results import Lossless, Row, Timing
from draftlab.evaluate.self_check import self_check
from draftlab.evaluate.statistics import (
    acceptance_interval,
    percentile_interval,
    ratio_interval,
    repetition_rate,
    resample_sums,
)
from draftlab.evaluate.timing import TimedRun
from draftlab.version import package_version


def acceptance_fields(
    generations: Sequence[Generation], *, greedy: bool, rows: int
) -> dict[str, Any]:
    """Return a row's raw counters and the fields that follow from the generations alone.

    Args:
        generations: one for each prompt of the suite.
        greedy: whether T = 0.
        rows: rows of the report whose self-checks share one level.
    """
    counters = Counters.total(g.counters for g in generations)
    expected = np.sum([g.expected for g in generations], axis=0)
    has_expected = counters.drafts > 0 and len(expected) == counters.k
    return {
        "prompts": len(generations),
        "output_tokens": sum(len(g.token_ids) for g in generations),
        **asdict(counters),
        "expected_acceptance": (expected / counters.drafts).tolist() if has_expected else None,
        "self_check": self_check(generations, counters.k, greedy=greedy, rows=rows),
        "acceptance_length": counters.acceptance_length,
        "acceptance_length_ci": acceptance_interval([g.counters for g in generations]),
        "repetition_rate": repetition_rate(g.token_ids for g in generations),
    }


def timing(
    run: TimedRun,
    plain: TimedRun | None,
    *,
    batch: int,
    distinct: int | None = None,
    floor_ms: float | None = None,
) -> Timing | None:
    """Return the times of one configuration; None if no prompt has a second output token.

    Args:
        run: the timed generations.
        plain: plain decoding of the same prompts, for the speed-up.
        batch: prompts decoded at once.
        distinct: prompts after which the generations begin again with the first one (see
            `timing_batches`); None: all differ. Intervals are over different prompts.
        floor_ms: bandwidth floor of a step, in milliseconds.
    """
    times, tokens, steps = _decode_sums(run, distinct)
    if not tokens.sum():
        return None
    fields: dict[str, Any] = {
        "batch": batch,
        "prompts": len(run.generations),
        "tpot_ms": times.sum() / tokens.sum(),
        "tpot_ms_ci": ratio_interval(times, tokens),
        "ttft_ms": 1e3 * float(np.mean([g.first_token_s for g in run.generations])),
        "step_ms": times.sum() / steps.sum() if steps.sum() else None,
        "floor_ms": floor_ms,
        "throughput_tok_s": sum(len(g.token_ids) for g in run.generations) / run.wall_s,
        "tokens_per_step": tokens.sum() / steps.sum() if steps.sum() else None,
        "acceptance_at": Counters.total(g.counters for g in run.generations).acceptance_at,
    }
    plain_times, plain_tokens, plain_steps = (
        _decode_sums(plain, distinct) if plain else (np.zeros(1),) * 3
    )
    if plain_tokens.sum():
        baseline = plain_times.sum() / plain_tokens.sum()
        sums = resample_sums(plain_times, plain_tokens, plain_steps, times, tokens, steps)
        with np.errstate(invalid="ignore", divide="ignore"):  # a resample may have no second token
            speedups = sums[0] / sums[1] / (sums[3] / sums[4])
            step_ratios = sums[3] / sums[5] / (sums[0] / sums[2])
        fields |= {
            "baseline_tpot_ms": baseline,
            "speedup": baseline / fields["tpot_ms"],
            "speedup_ci": percentile_interval(speedups, 0.95),
            "step_ratio_ci": percentile_interval(step_ratios, 0.95) if steps.sum() else None,
        }
    return Timing(**fields)


def _decode_sums(run: TimedRun, distinct: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each prompt's milliseconds, tokens and steps after the first token, each [P].

    Those of a prompt that was decoded several times are added up.
    """
    answers = [
        (1e3 * (g.total_s - g.first_token_s), len(g.token_ids) - 1, len(g.steps))
        if len(g.token_ids) > 1
        else (0, 0, 0)
        for g in run.generations
    ]
    prompt = np.arange(len(answers)) % (distinct or len(answers))
    times, tokens, steps = (np.bincount(prompt, sums) for sums in np.array(answers, dtype=float).T)
    return times, tokens, steps


def timing_fields(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the row's time fields: those of the first timing, and the list of all timings."""
    if not timings:
        return {}
    shared = Row.model_fields.keys() & Timing.model_fields.keys() - {"batch", "prompts"}
    return timings[0].model_dump(include=shared) | {"timings": list(timings)}


def equality_fields(
    generations: Sequence[Generation], plain: Sequence[Generation], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the share of prompts with the same tokens as plain decoding at T = 0.

    Equal tokens prove L2 in float32. In other dtypes they only show closeness (L3).
    """
    equal = share_equal(generations, plain)
    exact = dtype == torch.float32 and equal == 1.0
    lossless = Lossless(
        level="L2" if exact else "L3",
        test=f"tokens equal to plain decoding: {equal:.1%} of prompts",
        n=len(generations),
    )
    return {"prompts_equal": equal, "lossless": lossless}


def share_equal(generations: Sequence[Generation], others: Sequence[Generation]) -> float:
    """Return the share of prompts with the same tokens in both, which have the same order."""
    pairs = zip(generations, others, strict=True)
    return float(np.mean([a.token_ids == b.token_ids for a, b in pairs]))


def device_name(device: torch.device) -> str:
    """Return the device name for a row."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions, device and CPU threads for a report."""
    names = ("draftlab", "torch", "transformers")
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in names},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
