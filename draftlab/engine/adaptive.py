"""Adaptive verification: how many drafts a step proposes and verifies, from survival and costs.

A fixed K drafts too much on a busy GPU and too little on an idle one. Here each step has a shape
(`StepShape`) that promises the most tokens a second:

    expected tokens = rows + Σ of the largest survivals within the budget
    cost            = measured milliseconds of a step of that shape

The survivals are those of drafts that the host has read, a step or more ago. So the budget depends
on nothing that the drafts of the step itself decide, and within the budget drafts are chosen by
what comes before them (`kernels/draft_allocation.py`): the output keeps the target's distribution.
Their drafts need noise of their own for every step, since a choice looks at confidences that
depend on drafts behind a rejected one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from draftlab.engine.step_costs import ShapeFamily, StepCosts

Array = np.ndarray
PRIOR, NEWTON_STEPS = 4.0, 4
FIRST_INTERVAL = 8
LARGEST_CONFIDENCE = 32.0  # a logit; 1 − σ(32) is below float32's resolution


@dataclass(frozen=True)
class Calibration:
    """Logistic calibration of confidence by depth: P(accepted) = σ(scale · confidence + bias).

    Attributes:
        scale, bias: K numbers each.
    """

    scale: tuple[float, ...]
    bias: tuple[float, ...]

    @classmethod
    def identity(cls, k: int) -> Calibration:
        """Return the calibration that takes the confidence as it is."""
        return cls((1.0,) * k, (0.0,) * k)


@dataclass(frozen=True)
class AdaptiveVerification:
    """Settings of adaptive verification.

    Attributes:
        calibration: from earlier measurements, where the fit to the engine's own steps begins;
            None: the confidence as it is.
        shares: shares of a batch's drafts that a step may verify, beside all of them.
        interval: most steps between two decisions; the first ones follow sooner.
        window: recent rows of steps that survival is estimated from.
        margin: a shape is left for another one only if that promises so much more.
        least_rows: rows from which on shares of the drafts are considered; with fewer rows a step
            reads weights for longer than it multiplies, whatever it verifies.
        explore_every: decisions without drafts after which drafts are tried again.
        cycle: take every shape in turn, whatever it costs, as tests of losslessness need it. Each
            has two steps: the first one proposes the drafts that the second one can verify.
    """

    calibration: Calibration | None = None
    shares: tuple[float, ...] = (0.75, 0.5)
    interval: int = 128
    window: int = 512
    margin: float = 0.01
    least_rows: int = 8
    explore_every: int = 8
    cycle: bool = False


def shape_families(k: int, shares: Sequence[float], *, budgets: bool) -> list[ShapeFamily]:
    """Return the shapes to choose from: no drafts, some K's up to `k`, and shares of their drafts.

    Args:
        budgets: whether verifying a share of the drafts costs less than all of them.
    """
    ks = sorted({0, 1, 2, 3, 5, k} - set(range(k + 1, 6)))
    families = [ShapeFamily(each) for each in ks]
    if budgets:
        families += [ShapeFamily(each, share) for each in ks if each > 1 for share in shares]
    return families


@dataclass
class AdaptivePolicy:
    """Choose the shape of steps; deterministic in the results that it is shown.

    Attributes:
        k: most drafts a step.
        costs: of every family that may be chosen.
        settings: see there.
        scale, bias: float64 [K], the present calibration.
    """

    k: int
    costs: StepCosts
    settings: AdaptiveVerification
    scale: Array = field(init=False)
    bias: Array = field(init=False)

    def __post_init__(self) -> None:
        start = self.settings.calibration or Calibration.identity(self.k)
        self._start = np.array([start.scale, start.bias], dtype=np.float64)[:, : self.k]
        self.scale, self.bias = self._start
        shape = self.settings.window, self.k
        self._confidence = np.full(shape, np.nan)  # NaN behind the stored drafts
        self._tested = np.zeros(shape, dtype=bool)
        self._hit = np.zeros(shape, dtype=bool)
        self._rows_seen = 0
        self._steps = self._undrafted = self._next_decision = self._rows = 0
        self._interval = FIRST_INTERVAL
        self._current: ShapeFamily | None = None

    @property
    def families(self) -> list[ShapeFamily]:
        """The families to choose from."""
        return list(self.costs.measured)

    @property
    def due(self) -> bool:
        """True if the next choice is a decision, which reads what was observed."""
        return self._steps >= self._next_decision

    def observe(self, accepted: Array, num_drafts: Array, confidence: Array) -> None:
        """Take in the results of rows of steps, the latest last.

        Args:
            accepted, num_drafts: int [B]; rows with num_drafts ≤ 0 verified nothing.
            confidence: float [B, k] of the drafts that were stored, k ≤ K.
        """
        rows = np.flatnonzero(num_drafts > 0)[-self.settings.window :]
        count, k = len(rows), confidence.shape[1]
        if not count or not k:
            return
        depth = np.arange(self.k)
        at = (self._rows_seen + np.arange(count)) % self.settings.window
        self._confidence[at] = np.nan
        self._confidence[at[:, None], depth[:k]] = confidence[rows].clip(
            -LARGEST_CONFIDENCE, LARGEST_CONFIDENCE
        )
        accepted, num_drafts = accepted[rows, None], num_drafts[rows, None]
        self._hit[at] = depth < accepted
        self._tested[at] = depth < np.minimum(accepted + 1, num_drafts)
        self._rows_seen += count

    def choose(self, rows: int) -> tuple[ShapeFamily, bool]:
        """Return the family of the next step of `rows` rows, and whether calibration changed."""
        if self.settings.cycle:
            self._steps += 1
            return self.families[self._steps // 2 % len(self.families)], False
        due = self.due
        self._steps += 1
        if not due and rows == self._rows:
            return self._current, False
        self._rows = rows
        if due and self._rows_seen:
            self._fit()
        explores = self._undrafted >= self.settings.explore_every
        self._current = self._least() if explores else self._best(rows)
        if due:
            self._undrafted = 0 if self._current.k else self._undrafted + 1
            if self._rows_seen and not explores:
                self._interval = min(2 * self._interval, self.settings.interval)
            wait = FIRST_INTERVAL if explores else self._interval
            self._next_decision = self._steps - 1 + wait
        return self._current, due

    def _least(self) -> ShapeFamily:
        """Return the family with the fewest drafts."""
        return min((f for f in self.families if f.k), key=lambda f: (f.k, -f.share))

    def _best(self, rows: int) -> ShapeFamily:
        """Return the family with the most tokens a millisecond; all drafts until some were seen."""
        everything = ShapeFamily(self.k)
        if self._rows_seen < min(8 * rows, self.settings.window):
            return everything
        expected = self._expected()
        rates = {
            family: expected[family] / self.costs.ms(family, rows)
            for family in self.families
            if family.share == 1 or rows >= self.settings.least_rows
        }
        best = max(rates, key=lambda family: rates[family])
        current = self._current
        if current in rates and rates[best] < (1 + self.settings.margin) * rates[current]:
            return current
        return best

    def _survival(self) -> Array:
        """Return the survival of drafts in the window, float64 [rows, K].

        Where no draft was stored, its confidence is the mean of its depth, or of the depth before
        where that has none.
        """
        logits = self._confidence[: self._rows_seen] * self.scale + self.bias
        confidence = 1 / (1 + np.exp(-logits))
        known = ~np.isnan(confidence)
        mean = 1.0
        for depth in range(self.k):
            column = confidence[:, depth]
            if known[:, depth].any():
                mean = float(column[known[:, depth]].mean())
            column[~known[:, depth]] = mean
        return confidence.cumprod(1)

    def _expected(self) -> dict[ShapeFamily, float]:
        """Return the expected tokens of a row by family."""
        survival = self._survival()
        sums = {0: np.zeros(1)}  # by K: of the largest survivals
        for k in {family.k for family in self.families} - {0}:
            largest = np.sort(survival[:, :k].astype(np.float32), axis=None)[::-1]
            sums[k] = np.concatenate([[0.0], largest.cumsum(dtype=np.float64)])
        return {
            family: 1
            + sums[family.k][int(family.share * (len(sums[family.k]) - 1))] / len(survival)
            for family in self.families
        }

    def _fit(self) -> None:
        """Fit the logistic regression of each depth to the window, by Newton's method.

        A quadratic penalty, as of `PRIOR` observations, holds the fit to where it began.
        """
        start_scale, start_bias = self._start
        rows = slice(min(self._rows_seen, self.settings.window))
        x = np.nan_to_num(self._confidence[rows])
        tested, hit = self._tested[rows], self._hit[rows]
        for _ in range(NEWTON_STEPS):
            p = 1 / (1 + np.exp(-(x * self.scale + self.bias)))
            error, weight = np.where(tested, hit - p, 0.0), np.where(tested, p * (1 - p), 0.0)
            gradient_scale = (error * x).sum(0) - PRIOR * (self.scale - start_scale)
            gradient_bias = error.sum(0) - PRIOR * (self.bias - start_bias)
            a = (weight * x * x).sum(0) + PRIOR
            b, c = (weight * x).sum(0), weight.sum(0) + PRIOR
            determinant = a * c - b * b
            scale_step = (c * gradient_scale - b * gradient_bias) / determinant
            bias_step = (a * gradient_bias - b * gradient_scale) / determinant
            self.scale = self.scale + scale_step.clip(-1, 1)
            self.bias = self.bias + bias_step.clip(-1, 1)
