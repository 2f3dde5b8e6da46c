"""What generations measure: the figures of a report's row, and the machine they come from."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from functools import reduce
from importlib import metadata
from operator import add
from typing import Any

import numpy as np
import torch

from draftlab.engine.counters import Counters
from draftlab.engine.sampling import Generation
from draftlab.evaluate.results import Lossless, Timing
from draftlab.evaluate.self_check import self_check
from draftlab.evaluate.statistics import acceptance_interval, bootstrap_interval, repetition_rate
from draftlab.evaluate.timing import Timed


def counted_figures(generations: Sequence[Generation], *, greedy: bool) -> dict[str, Any]:
    """A row's counters and what is made from them alone.

    Args:
        generations: of the whole suite.
        greedy: whether T = 0.
    """
    counters: Counters = reduce(add, (g.counters for g in generations))
    expected = np.sum([g.expected for g in generations], axis=0)
    known = counters.drafts > 0 and len(expected) == counters.k
    return {
        "prompts": len(generations),
        "output_tokens": sum(len(g.token_ids) for g in generations),
        "undrafted_steps": counters.undrafted_steps,
        "truncated_tokens": counters.truncated_tokens,
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted": counters.accepted,
        "accepted_at": counters.accepted_at,
        "expected_acceptance": (expected / counters.drafts).tolist() if known else None,
        "self_check": self_check(generations, counters.k, greedy=greedy),
        "acceptance_length": counters.acceptance_length,
        "acceptance_length_ci": acceptance_interval([g.counters for g in generations]),
        "repetition_rate": repetition_rate(g.token_ids for g in generations),
    }


def timing(
    timed: Timed, plain: Timed | None, *, batch: int, floor: float | None = None
) -> Timing | None:
    """Times of one setting; None where no prompt had a second token.

    Args:
        timed: what was timed.
        plain: the plain decoding of the same prompts, for the speed-up.
        batch: prompts decoded at once.
        floor: of a step, in milliseconds.
    """
    tpots = _tpots_ms(timed)
    if not tpots:
        return None
    steps = sum(len(g.steps) for g in timed.generations)
    decode_s = sum(g.total_s - g.first_token_s for g in timed.generations)
    tokens = sum(len(g.token_ids) for g in timed.generations)
    found = Timing(
        batch=batch,
        prompts=len(timed.generations),
        tpot_ms=float(np.mean(tpots)),
        tpot_ms_ci=_ratio_interval(tpots, [1.0] * len(tpots)),
        ttft_ms=1e3 * float(np.mean([g.first_token_s for g in timed.generations])),
        step_ms=1e3 * decode_s / steps if steps else None,
        floor_ms=floor,
        throughput_tok_s=tokens / timed.wall_s,
    )
    bases = _tpots_ms(plain) if plain else []
    if len(bases) != len(tpots):  # an answer of one token has no TPOT to be compared
        return found
    base = float(np.mean(bases))
    return found.model_copy(
        update={
            "baseline_tpot_ms": base,
            "speedup": base / found.tpot_ms,
            "speedup_ci": _ratio_interval(bases, tpots),
        }
    )


def row_times(timings: Sequence[Timing]) -> dict[str, Any]:
    """The fields of a row that its first timing fills, and all of them."""
    if not timings:
        return {}
    first = timings[0].model_dump(exclude={"batch", "prompts"})
    return first | {"timings": list(timings)}


def _tpots_ms(timed: Timed) -> list[float]:
    """TPOT of the timed prompts that have one."""
    return [1e3 * g.tpot_s for g in timed.generations if g.tpot_s is not None]


def _ratio_interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of Σ above / Σ below over prompts, resampled in pairs."""
    a, b = np.array(above), np.array(below)
    return bootstrap_interval(lambda index: float(a[index].sum() / b[index].sum()), len(a))


def equality(
    generations: Sequence[Generation], plain: Sequence[Generation], dtype: torch.dtype
) -> dict[str, Any]:
    """Token equality at T = 0: it proves L2 in float32, else it only measures closeness (L3)."""
    pairs = zip(plain, generations, strict=True)
    equal = float(np.mean([a.token_ids == b.token_ids for a, b in pairs]))
    exact = dtype == torch.float32 and equal == 1.0
    lossless = Lossless(
        level="L2" if exact else "L3",
        test=f"tokens equal to plain decoding: {equal:.1%} of prompts",
        n=len(generations),
    )
    return {"prompts_equal": equal, "lossless": lossless}


def device_name(device: torch.device) -> str:
    """What a row calls the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()})"


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device, for the report."""
    names = ("draftlab", "torch", "transformers")
    return {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in names},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
