"""The speed-up as a function of K and batch, from tables of measured steps and acceptance.

With K drafts a step emits n(K) tokens in s(K) milliseconds: speed-up(K) = n(K) · s(0) / s(K).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.results import Row, Timing

Shape = tuple[int, int]
"""(batch, K); K = 0 is plain decoding."""


def suite_speedup(plain_ms: Any, step_ms: Any, tokens: Any) -> Any:
    """Return plain_ms · tokens / step_ms, the speed-up of steps that emit so many tokens.

    All are numbers or arrays. A step with drafts does all that one without does, so that it counts
    as no faster, and the speed-up as no larger than `tokens`.
    """
    return plain_ms * tokens / np.maximum(step_ms, plain_ms)


@dataclass(frozen=True)
class Probe:
    """A timing of a configuration that has no row: its K is timed for the adviser alone."""

    suite: str
    engine: str
    head: str | None
    temperature: float
    draft_probs: bool
    k: int
    timing: Timing


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of steps with one K.

    Attributes:
        at: unconditional acceptance at each position.
        emitted: tokens a step over AL; below 1, since stop tokens and limits truncate.
    """

    at: Sequence[float] = ()
    emitted: float = 1.0

    @property
    def length(self) -> float:
        """AL."""
        return 1 + sum(self.at)

    @property
    def tokens(self) -> float:
        """Tokens that a step emits."""
        return self.length * self.emitted


@dataclass(frozen=True)
class Measured:
    """The measurements of steps of one shape.

    Attributes:
        acceptance: of the same prompts; None if it is unknown.
        speedup, speedup_ci: over plain decoding of the same prompts; None for plain decoding.
        step_ratio_ci: interval of `step_ms` over a step of plain decoding.
    """

    step_ms: float
    acceptance: Acceptance | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    step_ratio_ci: tuple[float, float] | None = None

    @classmethod
    def from_timing(cls, timing: Timing) -> Measured | None:
        """Return the measurement of a timing's prompts; None if the machine was disturbed."""
        if timing.disturbance:
            return None
        at, tokens = timing.acceptance_at, timing.tokens_per_step
        acceptance = Acceptance(at, tokens / (1 + sum(at))) if at and tokens else None
        intervals = timing.timed_speedup_ci, timing.step_ratio_ci
        return cls(timing.step_ms, acceptance, timing.timed_speedup, *intervals)


@dataclass(frozen=True)
class SpeedupTable:
    """Measurements by (batch, K) that differ in nothing else; K = 0 is plain decoding.

    Attributes:
        flat: whether a single timed K serves all others, as for a parallel head.
        measured: by shape.
        head_steps: step times of the same head under the conditions where most were measured.
    """

    flat: bool
    measured: Mapping[Shape, Measured]
    head_steps: Mapping[Shape, float]

    @property
    def batches(self) -> list[int]:
        """Batches at which plain decoding and drafts were measured."""
        drafted = {batch for batch, k in self.measured if k}
        return sorted(batch for batch, k in self.measured if not k and batch in drafted)

    def at_batch(self, batch: int) -> dict[int, Measured]:
        """Return the measurements with drafts at a batch, by K."""
        by_k = {k: one for (b, k), one in self.measured.items() if b == batch and k}
        return dict(sorted(by_k.items()))

    def step_ms(self, batch: int, k: int, without: int | None = None) -> float | None:
        """Return the milliseconds of a step; None if they do not follow.

        A measured step is its own prediction. Others lie on the lines between the head's measured
        K's at this batch, moved by the interpolated difference to these conditions' own steps.

        Args:
            without: a K whose measurements are left out.
        """
        own = {i: m.step_ms for i, m in self.at_batch(batch).items() if i != without}
        if k in own:
            return own[k]
        steps = {i: ms for (b, i), ms in self.head_steps.items() if b == batch and i}
        steps.pop(without or 0, None)
        if not own or not (len(steps) > 1 or self.flat):
            return None
        if len(steps) < 2:
            return next(iter(own.values()))
        differences = [ms - _on_lines(i, steps) for i, ms in own.items()]
        return _on_lines(k, steps) + float(np.interp(k, [*own], differences))

    def predict(
        self,
        batch: int,
        k: int,
        acceptance: Mapping[int, Acceptance],
        without: int | None = None,
    ) -> tuple[Acceptance, float, float] | None:
        """Return acceptance, milliseconds of a step and speed-up; None if they are unknown."""
        at_k = interpolate_acceptance(k, acceptance)
        step = self.step_ms(batch, k, without)
        if at_k is None or step is None:
            return None
        plain = self.measured[batch, 0].step_ms
        return at_k, max(step, plain), float(suite_speedup(plain, step, at_k.tokens))

    def left_out(self, batch: int, k: int) -> float | None:
        """Return the speed-up of a measured K, predicted without any measurement with that K.

        The K must lie between two others: without the smallest or largest one the prediction would
        go beyond the measurements. None if there is no prediction.
        """
        own = self.at_batch(batch)
        if not min(own) < k < max(own):
            return None
        known = {i: m.acceptance for i, m in own.items() if i != k and m.acceptance}
        predicted = self.predict(batch, k, known, without=k)
        return predicted and predicted[2]


def _on_lines(k: int, steps: Mapping[int, float]) -> float:
    """Return the milliseconds at K on the lines between steps; the outer ones go on."""
    ks = sorted(steps)
    above = next((i for i in range(1, len(ks)) if ks[i] >= k), len(ks) - 1)
    low, high = ks[above - 1], ks[above]
    return steps[low] + (k - low) / (high - low) * (steps[high] - steps[low])


def interpolate_acceptance(k: int, known: Mapping[int, Acceptance]) -> Acceptance | None:
    """Return the acceptance with `k` drafts; None beyond the largest known K."""
    known = {0: Acceptance()} | dict(known)
    if k in known:
        return known[k]
    if k > max(known):
        return None
    below, above = max(i for i in known if i < k), min(i for i in known if i > k)
    low, high, weight = known[below], known[above], (k - below) / (above - below)
    at = [a + weight * (b - a) for a, b in zip(low.at, high.at, strict=False)]
    emitted = low.emitted + weight * (high.emitted - low.emitted)
    return Acceptance((*at, *high.at[below:k]), emitted)


Conditions = tuple[str, str | None, float, bool]
"""Engine, head, temperature and drafter setting."""


def conditions(one: Row | Probe) -> Conditions:
    """Return what the measurements of a table share."""
    return one.engine, one.head, one.temperature, one.draft_probs


def timing_tables(rows: Sequence[Row], probes: Sequence[Probe]) -> dict[Conditions, SpeedupTable]:
    """Return a table of the timed steps for each drafted row's conditions."""
    parallel = {row.head: row.drafter == "parallel" for row in rows}
    measured: dict[Conditions, dict[Shape, Measured]] = {}
    drafted = [row for row in rows if row.drafts]
    timings = [(conditions(p), p.k, p.timing) for p in probes]
    timings += [(conditions(row), row.k, timing) for row in drafted for timing in row.timings]
    for key, k, timing in timings:
        if (one := Measured.from_timing(timing)) is not None and timing.baseline_tpot_ms:
            table = measured.setdefault(key, {})
            table[timing.batch, k] = one
            table.setdefault((timing.batch, 0), Measured(timing.baseline_tpot_ms))
    wanted = {conditions(row) for row in drafted}
    return {
        key: SpeedupTable(parallel.get(key[1], False), own, _head_steps(key, measured))
        for key, own in measured.items()
        if key in wanted
    }


def _head_steps(
    key: Conditions, measured: Mapping[Conditions, Mapping[Shape, Measured]]
) -> dict[Shape, float]:
    """Return the steps of a head under its own conditions, or others if more were measured."""
    same_head = [measured[key], *(own for other, own in measured.items() if other[:2] == key[:2])]
    return {shape: one.step_ms for shape, one in max(same_head, key=len).items()}
