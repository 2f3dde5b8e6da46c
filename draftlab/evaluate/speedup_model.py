"""The speed-up as a function of K and batch, from tables of measured steps and acceptance.

An answer of n tokens after the first takes

    answer(K) = fixed(K) + n / tokens_per_step(K) · step(K);   speed-up(K) = answer(0) / answer(K)

with the milliseconds of a step and the tokens that it emits; `fixed` is the time to the first
token, which TPOT leaves out (0) and load does not. Under load a step holds prefills of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.cost_model import Shape, Steps, fit_cost_model
from draftlab.evaluate.results import LoadPoint, Row, Timing


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
        step_ms: milliseconds of a step; under load prefills of other requests are part of it.
        acceptance: of the same prompts; None if it is unknown.
        speedup, speedup_ci: over plain decoding of the same prompts; None for plain decoding.
        step_ratio_ci: interval of `step_ms` over a step of plain decoding.
        fixed_ms: milliseconds of an answer before its steps; not 0 under load.
        answer_tokens: tokens of an answer after its first; they matter with `fixed_ms` alone.
    """

    step_ms: float
    acceptance: Acceptance | None = None
    speedup: float | None = None
    speedup_ci: tuple[float, float] | None = None
    step_ratio_ci: tuple[float, float] | None = None
    fixed_ms: float = 0.0
    answer_tokens: float = 1.0

    @classmethod
    def from_timing(cls, timing: Timing) -> Measured | None:
        """Return the measurement of a timing's prompts; None if the machine was disturbed."""
        if timing.disturbance:
            return None
        acceptance = _acceptance(timing.acceptance_at, timing.tokens_per_step)
        intervals = timing.timed_speedup_ci, timing.step_ratio_ci
        return cls(timing.step_ms, acceptance, timing.timed_speedup, *intervals)

    @classmethod
    def from_load(cls, point: LoadPoint) -> Measured | None:
        """Return the measurement of a point under load; None without steps.

        The prefills of others stay in the steps. TTFTs do not tell how long these take: requests
        that are admitted together share a prefill, and steps beside it are part of a TTFT.
        """
        if not point.step_ms:
            return None
        return cls(
            point.step_ms,
            _acceptance(point.acceptance_at, point.tokens_per_step),
            point.speedup,
            point.speedup_ci,
            fixed_ms=point.ttft_ms.mean,
            answer_tokens=point.output_tokens / point.requests - 1,
        )


def _acceptance(at: Sequence[float] | None, tokens_per_step: float | None) -> Acceptance | None:
    return Acceptance(at, tokens_per_step / (1 + sum(at))) if at and tokens_per_step else None


@dataclass(frozen=True)
class SpeedupTable:
    """Measurements by (batch, K) that differ in nothing else; K = 0 is plain decoding.

    Attributes:
        flat: whether a single timed K serves all others, as for a parallel head.
        measured: by shape.
        head_steps: step times of the same head under the conditions where most were measured, which
            tell how a step's time depends on its shape.
    """

    flat: bool
    measured: Mapping[Shape, Measured]
    head_steps: Steps

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

        A measured step is its own prediction. Others follow the shape of the cost model; its
        difference to the measured steps of the batch is interpolated over K.

        Args:
            without: a K whose measurements are left out, at all batches.
        """
        own = {i: m.step_ms for i, m in self.at_batch(batch).items() if i != without}
        if k in own:
            return own[k]
        steps = {shape: ms for shape, ms in self.head_steps.items() if shape[1] != without}
        several = len({i for _, i in steps if i}) > 1
        if not own or not (several or self.flat):
            return None
        if not several:
            return next(iter(own.values()))
        tokens: dict[int, float] = {}
        if self.measured[batch, 0].fixed_ms:
            known = self._known_acceptance(batch, without)
            for i in {k, *(i for _, i in steps)}:
                tokens[i] = interpolate_acceptance(min(i, max(known)), known).tokens
        costs = fit_cost_model(steps, own_costs=True, tokens=tokens)
        differences = [ms - costs.ms(batch, i) for i, ms in own.items()]
        return costs.ms(batch, k) + float(np.interp(k, [*own], differences))

    def _known_acceptance(self, batch: int, without: int | None) -> dict[int, Acceptance]:
        """Return the measured acceptance at a batch by K, but for the K that is left out."""
        own = self.at_batch(batch).items()
        known = {i: m.acceptance for i, m in own if i != without and m.acceptance}
        return {0: Acceptance()} | known

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
        plain = self.measured[batch, 0]
        if not plain.fixed_ms:
            speedup = suite_speedup(plain.step_ms, step, at_k.tokens)
            return at_k, max(step, plain.step_ms), float(speedup)
        step = max(step, plain.step_ms)
        own = {i: m.fixed_ms for i, m in self.at_batch(batch).items() if i != without}
        fixed = float(np.interp(k, [*own], [*own.values()]))
        tokens = plain.answer_tokens
        answer = fixed + tokens / at_k.tokens * step
        return at_k, step, (plain.fixed_ms + tokens * plain.step_ms) / answer

    def left_out(self, batch: int, k: int) -> float | None:
        """Return the speed-up of a measured K, predicted without any measurement with that K.

        The K must lie between two others: without the smallest or largest one the prediction would
        go beyond the measurements. None if there is no prediction.
        """
        own = self.at_batch(batch)
        if not min(own) < k < max(own):
            return None
        predicted = self.predict(batch, k, self._known_acceptance(batch, k), without=k)
        return predicted and predicted[2]


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


def conditions(one: Row | Probe | LoadPoint) -> Conditions:
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
    tables = _tables(measured, parallel)
    return {key: table for key, table in tables.items() if key in wanted}


def goodput_tables(
    points: Sequence[LoadPoint], rows: Sequence[Row]
) -> dict[Conditions, SpeedupTable]:
    """Return a table of the measurements under load for each drafted configuration's conditions.

    A configuration that does not always verify K drafts has no place in a table by K.
    """
    parallel = {row.head: row.drafter == "parallel" for row in rows}
    plain = {
        (p.engine, p.temperature, p.concurrency): Measured.from_load(p) for p in points if not p.k
    }
    measured: dict[Conditions, dict[Shape, Measured]] = {}
    for point in points:
        base = plain.get((point.engine, point.temperature, point.concurrency))
        one = Measured.from_load(point)
        if point.k and one and base:
            table = measured.setdefault(conditions(point), {})
            table[point.concurrency, point.k] = one
            table[point.concurrency, 0] = base
    return _tables(measured, parallel)


def _tables(
    measured: Mapping[Conditions, Mapping[Shape, Measured]], parallel: Mapping[str | None, bool]
) -> dict[Conditions, SpeedupTable]:
    tables = {}
    for key, own in measured.items():
        same_head = [table for other, table in measured.items() if other[:2] == key[:2]]
        largest = max(same_head, key=len)
        largest = own if len(own) == len(largest) else largest
        steps = {shape: one.step_ms for shape, one in largest.items()}
        tables[key] = SpeedupTable(parallel.get(key[1], False), own, steps)
    return tables
