"""Measure what admitting requests costs: their prefill and first drafts.

An answer of n tokens after its first takes n / (tokens of a step) steps, and one admission. Where
answers are short and so are steps, the time of an admission counts, and it depends on K, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from draftlab.engine.step_costs import interpolate, rounds

LAUNCHES = 3
"""Admissions of a timing, launched one behind the other."""


@dataclass(frozen=True)
class AdmissionCosts:
    """Milliseconds of admissions, by the number of first drafts and of requests.

    Attributes:
        measured: for each number of drafts, milliseconds by the requests admitted together.
    """

    measured: Mapping[int, Mapping[int, float]]

    def ms(self, k: int, requests: float) -> float:
        """Return the milliseconds for each request.

        Args:
            requests: mean number admitted between two steps; below 1, requests come alone.
        """
        measured = self.measured[k]
        together = min(max(requests, 1.0), max(measured))
        return interpolate(measured, together) / together


def measure_admission_costs(
    run: Callable[[int, int], object],
    ks: Collection[int],
    sizes: Collection[int],
    device: torch.device,
) -> AdmissionCosts:
    """Return the median time of admissions, on the device or on the host, whichever is longer.

    Args:
        run: launches an admission of a number of requests with a number of first drafts.
        sizes: numbers of requests.
    """
    pairs = [(k, requests) for k in ks for requests in sizes]
    times: dict[tuple[int, int], list[float]] = {pair: [] for pair in pairs}

    def timed(k: int, requests: int) -> float:
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(LAUNCHES):
            run(requests, k)
        _synchronize(device)
        return 1e3 * (time.perf_counter() - started) / LAUNCHES

    for pair in pairs:
        timed(*pair)  # it compiles and captures
    for _ in rounds():
        for pair in pairs:
            times[pair].append(timed(*pair))
    measured: dict[int, dict[int, float]] = {}
    for (k, requests), each in times.items():
        measured.setdefault(k, {})[requests] = float(np.median(each))
    return AdmissionCosts(measured)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
