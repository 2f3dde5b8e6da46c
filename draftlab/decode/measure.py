"""What generations measure: the figures of a report's row, and the machine they come from."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import metadata
from operator import add
from typing import Any

import numpy as np
import torch

from draftlab.decode.sampling import Generation
from draftlab.results import (
    Counters,
    Lossless,
    acceptance_interval,
    bootstrap_interval,
    repetition_rate,
)


@dataclass(frozen=True)
class Measured:
    """One way of decoding: `counted` over the whole suite in batches, `timed` at batch 1.

    `timed` is empty when no times were asked for.
    """

    counted: list[Generation]
    timed: list[Generation]

    @property
    def tpots_ms(self) -> list[float]:
        """TPOT of the timed prompts that have one."""
        return [1e3 * g.tpot_s for g in self.timed if g.tpot_s is not None]


def counted_figures(found: Measured) -> dict[str, Any]:
    """A row's counters and what is made from them alone."""
    generations = found.counted
    counters: Counters = reduce(add, (g.counters for g in generations))
    expected = np.sum([g.expected for g in generations], axis=0)
    return {
        "prompts": len(generations),
        "output_tokens": sum(len(g.token_ids) for g in generations),
        "undrafted_steps": counters.undrafted_steps,
        "truncated_tokens": counters.truncated_tokens,
        "drafts": counters.drafts,
        "draft_tokens": counters.draft_tokens,
        "accepted": counters.accepted,
        "accepted_at": counters.accepted_at,
        "expected_acceptance": (expected / counters.drafts).tolist() if counters.drafts else None,
        "acceptance_length": counters.acceptance_length,
        "acceptance_length_ci": acceptance_interval([g.counters for g in generations]),
        "repetition_rate": repetition_rate(g.token_ids for g in generations),
    }


def timed_figures(found: Measured, baseline: Measured | None) -> dict[str, Any]:
    """A row's times in milliseconds; with the plain decoding of the same prompts, the speed-up."""
    tpots = found.tpots_ms
    if not tpots:
        return {}
    steps = sum(len(g.steps) for g in found.timed)
    decode_s = sum(g.total_s - g.first_token_s for g in found.timed)
    figures: dict[str, Any] = {
        "tpot_ms": float(np.mean(tpots)),
        "tpot_ms_ci": _mean_interval(tpots),
        "ttft_ms": 1e3 * float(np.mean([g.first_token_s for g in found.timed])),
        "step_ms": 1e3 * decode_s / steps if steps else None,
    }
    if baseline is not None and baseline.tpots_ms:
        base = float(np.mean(baseline.tpots_ms))
        figures |= {"baseline_tpot_ms": base, "speedup": base / figures["tpot_ms"]}
    return figures


def equality(found: Measured, plain: Measured, dtype: torch.dtype) -> dict[str, Any]:
    """Token equality at T = 0: it proves L2 in float32, else it only measures closeness (L3)."""
    pairs = zip(plain.counted, found.counted, strict=True)
    equal = float(np.mean([a.token_ids == b.token_ids for a, b in pairs]))
    exact = dtype == torch.float32 and equal == 1.0
    lossless = Lossless(
        level="L2" if exact else "L3",
        test=f"tokens equal to plain decoding: {equal:.1%} of prompts",
        n=len(found.counted),
    )
    return {"prompts_equal": equal, "lossless": lossless}


def _mean_interval(values: list[float]) -> tuple[float, float]:
    array = np.array(values)
    statistic: Callable[[np.ndarray], float] = lambda index: float(array[index].mean())  # noqa: E731
    return bootstrap_interval(statistic, len(values))


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """On a CPU, one thread inside the block: a second one gains little and makes times noisy."""
    threads = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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
