"""The speed-up as a function of K, from what was counted over the suite and timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftlab.evaluate.results import Row, Timing

Steps = Mapping[int, float]
"""Milliseconds of a step, by K."""


@dataclass(frozen=True)
class Probe:
    """A timing of a configuration that has no row: its K is timed for the adviser alone."""

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
class SpeedupModel:
    """The speed-up by K, from the measurements at one batch that differ in K alone.

    Attributes:
        largest: the row with the largest K.
        lengths: intervals of AL over the suite, by K.
        counted: acceptance of the suite, by K.
        timings: timings with a step time, by K.
    """

    largest: Row
    batch: int
    lengths: Mapping[int, tuple[float, float] | None]
    counted: Mapping[int, Acceptance]
    timings: Mapping[int, Timing]

    @property
    def steps(self) -> dict[int, float]:
        """Milliseconds of a step, by K."""
        return {k: timing.step_ms or 0.0 for k, timing in self.timings.items()}

    @property
    def timed(self) -> dict[int, Acceptance]:
        """Acceptance of the timed prompts, by K."""
        return {
            k: Acceptance(t.acceptance_at, t.tokens_per_step / (1 + sum(t.acceptance_at)))
            for k, t in self.timings.items()
            if t.acceptance_at and t.tokens_per_step
        }

    def at(
        self,
        k: int,
        plain: float,
        acceptance: Mapping[int, Acceptance],
        steps: Steps,
        others: Steps,
    ) -> tuple[Acceptance, float, float] | None:
        """Return acceptance, milliseconds of a step and speed-up at K; None if they are unknown."""
        at_k = interpolate_acceptance(k, acceptance)
        step = step_ms(k, steps, others, flat=self.largest.drafter == "parallel")
        if at_k is None or step is None:
            return None
        step = max(step, plain)  # a step that verifies drafts is no faster than one without drafts
        return at_k, step, plain * at_k.tokens / step


def speedup_models(rows: Sequence[Row], probes: Sequence[Probe]) -> list[SpeedupModel]:
    """Return a model for each engine, head, temperature, drafter setting and timed batch."""
    by_key: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.drafts:
            by_key.setdefault(conditions(row), []).append(row)
    models = []
    for key, members in by_key.items():
        members.sort(key=lambda row: row.k)
        timings = [(p.k, p.timing) for p in probes if conditions(p) == key]
        timings += [(row.k, timing) for row in members for timing in row.timings]
        for batch in (timing.batch for timing in members[-1].timings):
            models.append(
                SpeedupModel(
                    members[-1],
                    batch,
                    {row.k: row.acceptance_length_ci for row in members},
                    {
                        row.k: Acceptance(
                            row.counters.acceptance_at or (),
                            row.tokens_per_step / (row.acceptance_length or 1.0),
                        )
                        for row in members
                    },
                    {k: t for k, t in timings if t.batch == batch and t.step_ms},
                )
            )
    return models


def conditions(one: Row | Probe) -> tuple[Any, ...]:
    """Return what the measurements of a model share, except the batch."""
    return one.engine, one.head, one.temperature, one.draft_probs


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


def step_ms(k: int, steps: Steps, others: Steps, *, flat: bool = False) -> float | None:
    """Return the milliseconds of a step with `k` drafts; None if they do not follow.

    Args:
        steps: measured step times, by K.
        others: step times of the same head and batch under other conditions, which give the slope
            if there is one step time only.
        flat: whether the slope is 0 without any.
    """
    ks = sorted(steps)
    if not ks:
        return None
    if ks[0] <= k <= ks[-1]:
        return float(np.interp(k, ks, [steps[i] for i in ks]))
    end = ks[0] if k < ks[0] else ks[-1]
    nearest = ks[:2] if k < ks[0] else ks[-2:]
    points = {i: steps[i] for i in nearest} if len(ks) > 1 else others
    if len(points) > 1:
        # Least squares; the rest of polyfit's result is the intercept.
        slope = float(np.polyfit(list(points), list(points.values()), 1)[0])
        return steps[end] + slope * (k - end)
    return steps[end] if flat else None
