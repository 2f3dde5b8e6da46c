"""Measure what admitting requests costs: their prefill and first drafts.

An answer of n tokens after its first takes n / (tokens of a step) steps, and one admission. Where
answers are short and so are steps, the time of an admission counts, and it depends on K, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from draftlab.engine.step_costs import interpolate, rounds

BUSY_CYCLES = 10_000_000
"""Cycles for which the device is busy while an admission is launched: 5 to 7 ms."""


@dataclass(frozen=True)
class AdmissionCosts:
    """Milliseconds of admissions on device and host, by first drafts and requests.

    Attributes:
        device, host: for each number of drafts, milliseconds by the requests admitted together.
            What a CPU does is in `device` alone.
    """

    device: Mapping[int, Mapping[int, float]]
    host: Mapping[int, Mapping[int, float]]

    def extra_ms(self, k: int, requests: float, step_ms: float, host_ms: float) -> float:
        """Return how many milliseconds an admission adds to those between two steps.

        The host launches a prefill while the device runs the step before it, and the next step
        while the device runs the prefill.

        Args:
            requests: mean number admitted at once.
            step_ms: of a step on the device.
            host_ms: of a step on the host.
        """
        device, host = (_scaled(costs[k], requests) for costs in (self.device, self.host))
        return max(host, step_ms) + max(device, host_ms) - max(step_ms, host_ms)


def _scaled(measured: Mapping[int, float], requests: float) -> float:
    """Return the cost of so many requests; beyond those measured, in proportion."""
    return interpolate(measured, requests) * max(requests / max(measured), 1.0)


def measure_admission_costs(
    run: Callable[[int, int], object],
    ks: Collection[int],
    sizes: Collection[int],
    device: torch.device,
) -> AdmissionCosts:
    """Return the median times of admissions on device and host.

    Args:
        run: launches an admission of a number of requests with a number of first drafts.
        sizes: numbers of requests.
    """
    timed = _timed_on_gpu if device.type == "cuda" else _timed_on_cpu
    pairs = [(k, requests) for k in ks for requests in sizes]
    times: dict[tuple[int, int], list[tuple[float, float]]] = {pair: [] for pair in pairs}
    for k, requests in pairs:
        run(requests, k)  # it compiles and captures
    for _ in rounds():
        for k, requests in pairs:
            times[k, requests].append(timed(partial(run, requests, k)))
    on_device: dict[int, dict[int, float]] = {k: {} for k in ks}
    on_host: dict[int, dict[int, float]] = {k: {} for k in ks}
    for (k, requests), each in times.items():
        on_device[k][requests], on_host[k][requests] = map(float, np.median(each, axis=0))
    return AdmissionCosts(on_device, on_host)


def _timed_on_cpu(run: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds of a call, and 0."""
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started), 0.0


def _timed_on_gpu(run: Callable[[], object]) -> tuple[float, float]:
    """Return the milliseconds that a call takes on the device, and on the host."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    host_ms = 1e3 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY_CYCLES)  # all is launched before the device begins with it
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end), host_ms
