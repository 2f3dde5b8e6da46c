"""A realistic report whose counters come from simulated steps."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from draftlab.engine.counters import Counters
from draftlab.evaluate.adviser import advise
from draftlab.evaluate.metrics import acceptance_interval
from draftlab.evaluate.results import Report, Row, Timing

PLAIN_MS = 9.84
"""TPOT without drafting."""
OUTPUT_TOKENS = 128

COMMON: dict[str, Any] = {
    "engine": "draftlab-eager",
    "engine_version": "0.1.0",
    "device": "cpu (2 threads)",
    "dtype": "float32",
    "batch": 1,
    "suite": "embedded/held-out",
    "suite_sha256": "9f2c1e6a" * 8,
    "template": "5d41402a" * 8,
    "max_new_tokens": OUTPUT_TOKENS,
    "seed": 0,
    "top_k": None,
    "top_p": None,
}


def simulated_counters(keep: float, k: int, prompts: int) -> list[Counters]:
    """Return the counters of each prompt; `keep` is the conditional acceptance at each position."""
    generator = np.random.default_rng(int(1000 * keep))
    per_prompt = []
    for _ in range(prompts):
        counters, tokens = Counters(k), 1
        while tokens < OUTPUT_TOKENS:
            below = generator.random(k) < keep * generator.uniform(0.9, 1.1)
            accepted = int(np.cumprod(below).sum())
            counters.add_step(k, accepted)
            tokens += accepted + 1
        counters.truncated_tokens = tokens - OUTPUT_TOKENS
        per_prompt.append(counters)
    return per_prompt


def row(
    *,
    temperature: float = 0.0,
    draft_probs: bool = False,
    keep: float = 0.55,
    k: int = 4,
    prompts: int = 64,
    **changes: Any,
) -> Row:
    """Return a drafted row of simulated steps."""
    per_prompt = simulated_counters(keep, k, prompts)
    total = Counters.total(per_prompt)
    total.check_tokens(prompts * OUTPUT_TOKENS, prompts)
    tpot = PLAIN_MS / total.acceptance_length * 1.31
    fields = COMMON | {
        "head": "runs/quickstart/head",
        "drafter": "chain",
        "k_trained": 5,
        "temperature": temperature,
        "draft_probs": draft_probs,
        "prompts": prompts,
        "output_tokens": prompts * OUTPUT_TOKENS,
        **asdict(total),
        "expected_acceptance": [a + 0.004 for a in total.acceptance_at] if temperature else None,
        "acceptance_length": total.acceptance_length,
        "acceptance_length_ci": acceptance_interval(per_prompt, samples=200),
        "tpot_ms": tpot,
        "tpot_ms_ci": (tpot * 0.97, tpot * 1.035),
        "ttft_ms": 31.42,
        "step_ms": tpot * total.acceptance_length,
        "throughput_tok_s": 1000 / tpot,
        "baseline_tpot_ms": PLAIN_MS,
        "speedup": PLAIN_MS / tpot,
        "prompts_equal": 1.0 if temperature == 0 else None,
        "repetition_rate": 0.24 if temperature == 0 else 0.1,
    }
    return Row.model_validate(fields | changes)


NOTHING_DRAFTED: dict[str, Any] = {
    "drafts": 0,
    "draft_tokens": 0,
    "accepted": 0,
    "accepted_at": [0] * 4,
    "acceptance_length": None,
    "acceptance_length_ci": None,
}
"""Changes for a row of which no step had a draft."""
NOT_TIMED: dict[str, Any] = dict.fromkeys(
    ("tpot_ms", "tpot_ms_ci", "ttft_ms", "speedup", "baseline_tpot_ms")
)
"""Changes for a row that was not timed."""


def baseline(temperature: float = 0.0, **changes: Any) -> Row:
    """Return a row without a drafter."""
    fields = COMMON | {
        "head": None,
        "drafter": "none",
        "k_trained": None,
        "temperature": temperature,
        "draft_probs": False,
        "prompts": 64,
        "output_tokens": 64 * OUTPUT_TOKENS,
        **asdict(Counters(0, undrafted_steps=64 * (OUTPUT_TOKENS - 1))),
        "acceptance_length": None,
        "acceptance_length_ci": None,
        "tpot_ms": PLAIN_MS,
        "tpot_ms_ci": (9.71, 9.99),
        "ttft_ms": 29.8,
        "throughput_tok_s": 101.6,
        "repetition_rate": 0.24 if temperature == 0 else 0.1,
    }
    return Row.model_validate(fields | changes)


def report(rows: list[Row] | None = None) -> Report:
    """Return a report; by default two temperatures, with and without draft probabilities."""
    if rows is None:
        warning = "the answers repeat <themselves> [often]"
        rows = [
            baseline(),
            row(keep=0.62),
            baseline(0.8),
            row(temperature=0.8, keep=0.48, warnings=[warning]),
            row(temperature=0.8, keep=0.53, draft_probs=True),
        ]
    return Report(
        target={
            "name": "draftlab-embedded-12m",
            "fingerprint": "c0ffee12" * 8,
            "num_layers": 12,
            "hidden_size": 256,
            "vocab_size": 6144,
        },
        environment={
            "python": "3.11.2",
            "torch": "2.13.0+cpu",
            "transformers": "5.23.0",
            "timing": {"batch": 1, "prompts": 6, "tokens": 64, "threads": 1},
            "cpu": {"model": "Xeon", "threads": 2},
        },
        rows=rows,
    )


def with_timing(
    row: Row,
    step_ms: float,
    batch: int = 1,
    plain_ms: float = PLAIN_MS,
    *,
    spread: tuple[float, float] = (0.95, 1.06),
    **changes: Any,
) -> Row:
    """Return the row with a further timing.

    Args:
        spread: ends of the intervals of the speed-ups, as factors.
    """
    tpot = step_ms / row.tokens_per_step
    speedup = plain_ms / tpot
    interval = (spread[0] * speedup, spread[1] * speedup)
    drafted = {
        "baseline_tpot_ms": plain_ms,
        "speedup": speedup,
        "speedup_ci": interval,
        "timed_speedup": speedup,
        "timed_speedup_ci": interval,
        "step_ratio_ci": (0.97 * step_ms / plain_ms, 1.03 * step_ms / plain_ms),
    }
    fields = {
        "batch": batch,
        "prompts": max(10, batch),
        "tpot_ms": tpot,
        "tpot_ms_ci": (0.96 * tpot, 1.05 * tpot),
        "ttft_ms": 31.4,
        "step_ms": step_ms,
        "throughput_tok_s": 1000 * batch / tpot,
        "tokens_per_step": row.tokens_per_step,
        "acceptance_at": row.counters.acceptance_at,
        **(drafted if row.k else {}),
    }
    timing = Timing.model_validate(fields | changes)
    return row.model_copy(update={"timings": [*row.timings, timing]})


def with_adviser(rows: list[Row]) -> Report:
    """Return a report of the rows with the adviser's predictions."""
    return report(rows).model_copy(update={"adviser": advise(rows)})


def timed_report() -> Report:
    """Return two temperatures and two K's, timed at batch 1 and 8, 12 % of a step per draft."""
    rows = [
        baseline(),
        *(row(keep=0.62, k=k) for k in (2, 5)),
        baseline(0.8),
        *(
            row(temperature=0.8, keep=0.5, k=k, draft_probs=p)
            for k in (2, 5)
            for p in (False, True)
        ),
    ]
    for batch, plain_ms in ((1, PLAIN_MS), (8, 11.4)):
        rows = [with_timing(one, plain_ms * (1 + 0.12 * one.k), batch, plain_ms) for one in rows]
    return with_adviser(rows)
