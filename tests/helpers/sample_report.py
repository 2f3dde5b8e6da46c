"""A realistic report, counted the way a decoder counts it."""

from __future__ import annotations

from typing import Any

import numpy as np

from draftlab.engine.counters import Counters
from draftlab.evaluate.adviser import advise
from draftlab.evaluate.results import Report, Row, Timing
from draftlab.evaluate.statistics import acceptance_interval

COMMON: dict[str, Any] = {
    "engine": "draftlab-eager",
    "engine_version": "0.1.0",
    "device": "cpu (2 threads)",
    "dtype": "float32",
    "batch": 1,
    "suite": "embedded/held-out",
    "suite_sha256": "9f2c1e6a" * 8,
    "template": "5d41402a" * 8,
    "max_new_tokens": 128,
    "seed": 0,
    "top_k": None,
    "top_p": None,
}


def row(
    *,
    temperature: float = 0.0,
    draft_probs: bool = False,
    keep: float = 0.55,
    k: int = 4,
    prompts: int = 64,
    **changes: Any,
) -> Row:
    """A drafted row of simulated steps; `keep` is the conditional acceptance at each position."""
    generator = np.random.default_rng(int(1000 * keep))
    per_prompt, output = [], 0
    for _ in range(prompts):
        counters, tokens = Counters(k), 1
        while tokens < 128:
            accepted = int(
                np.cumprod(generator.random(k) < keep * generator.uniform(0.9, 1.1)).sum()
            )
            counters.add_step(k, accepted)
            tokens += accepted + 1
        counters.truncated_tokens = tokens - 128
        output += 128
        per_prompt.append(counters)
    total = sum(per_prompt[1:], per_prompt[0])
    total.check_tokens(output, prompts)
    tpot = 9.84 / total.acceptance_length * 1.31
    fields = COMMON | {
        "head": "runs/quickstart/head",
        "drafter": "chain",
        "k": k,
        "k_trained": 5,
        "temperature": temperature,
        "draft_temperature": None,
        "draft_probs": draft_probs,
        "prompts": prompts,
        "output_tokens": output,
        "undrafted_steps": total.undrafted_steps,
        "truncated_tokens": total.truncated_tokens,
        "drafts": total.drafts,
        "draft_tokens": total.draft_tokens,
        "accepted": total.accepted,
        "accepted_at": total.accepted_at,
        "expected_acceptance": [a + 0.004 for a in total.acceptance_at] if temperature else None,
        "acceptance_length": total.acceptance_length,
        "acceptance_length_ci": acceptance_interval(per_prompt, samples=200),
        "tpot_ms": tpot,
        "tpot_ms_ci": (tpot * 0.97, tpot * 1.035),
        "ttft_ms": 31.42,
        "step_ms": tpot * total.acceptance_length,
        "throughput_tok_s": 1000 / tpot,
        "baseline_tpot_ms": 9.84,
        "speedup": 9.84 / tpot,
        "prompts_equal": 1.0 if temperature == 0 else None,
        "repetition_rate": 0.24 if temperature == 0 else 0.1,
    }
    return Row.model_validate(fields | changes)


def baseline(temperature: float = 0.0, **changes: Any) -> Row:
    """A row without a drafter."""
    fields = COMMON | {
        "head": None,
        "drafter": "none",
        "k": 0,
        "k_trained": None,
        "temperature": temperature,
        "draft_temperature": None,
        "draft_probs": False,
        "prompts": 64,
        "output_tokens": 8192,
        "undrafted_steps": 8128,
        "truncated_tokens": 0,
        "drafts": 0,
        "draft_tokens": 0,
        "accepted": 0,
        "accepted_at": [],
        "acceptance_length": None,
        "acceptance_length_ci": None,
        "tpot_ms": 9.84,
        "tpot_ms_ci": (9.71, 9.99),
        "ttft_ms": 29.8,
        "throughput_tok_s": 101.6,
        "repetition_rate": 0.24 if temperature == 0 else 0.1,
    }
    return Row.model_validate(fields | changes)


def report(rows: list[Row] | None = None) -> Report:
    """Two temperatures, with and without draft probabilities, and their baselines."""
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
        rows=rows
        if rows is not None
        else [
            baseline(),
            row(keep=0.62),
            baseline(0.8),
            row(temperature=0.8, keep=0.48, warnings=["the answers repeat <themselves> [often]"]),
            row(temperature=0.8, keep=0.53, draft_probs=True),
        ],
    )


def timings(row: Row) -> list[Timing]:
    """Times at batch 1 and 8 of a row with a step of 9.84 ms and 12 % a draft."""
    found = []
    for batch, base in ((1, 9.84), (8, 11.4)):
        step = base * (1 + 0.12 * row.k)
        tpot = step / (row.acceptance_length or 1)
        drafted = {
            "baseline_tpot_ms": base,
            "speedup": base / tpot,
            "speedup_ci": (0.95 * base / tpot, 1.06 * base / tpot),
        }
        found.append(
            Timing(
                batch=batch,
                prompts=max(10, batch),
                tpot_ms=tpot,
                tpot_ms_ci=(0.96 * tpot, 1.05 * tpot),
                ttft_ms=31.4,
                step_ms=step,
                floor_ms=0.8 * step,
                throughput_tok_s=1000 * batch / tpot,
                **(drafted if row.k else {}),
            )
        )
    return found


def timed_report() -> Report:
    """Two temperatures and two K's, timed at two batches, with the adviser's word."""
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
    rows = [one.model_copy(update={"timings": timings(one)}) for one in rows]
    return report(rows).model_copy(update={"adviser": advise(rows)})
