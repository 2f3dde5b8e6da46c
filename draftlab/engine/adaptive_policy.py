"""The choice of adaptive verification: a shape, from rates of acceptance, confidence and costs."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, exp

import numpy as np

from draftlab.engine.acceptance_rates import AcceptanceRates
from draftlab.engine.adaptive import AdaptiveVerification, Decision
from draftlab.engine.admission_costs import AdmissionCosts
from draftlab.engine.step_costs import ShapeFamily, StepCosts
from draftlab.engine.survival import SurvivalModel, accepted_parts
from draftlab.engine.wall_times import TRIAL_STEPS, WallTimes, Window

Array = np.ndarray
FIRST_ROWS, FIRST_STEPS = 32, 8
"""Rows that are seen before anything but all drafts is chosen, and least steps of a decision."""
MOST_STEPS = 512
"""Most steps between two decisions."""
TRIAL_DRAFTS = 16
"""Rows of a trial that verify drafts, in all its steps."""
TRIAL_ROWS = 4
"""Rows that draft in a trial while drafting is suspended."""
SUSPENDED_ROWS = 256
"""Rows that what was seen before weighs while drafting is suspended."""
FIRST_CATCH_UP_MS = 20.0
"""Milliseconds that catching up a few rows is supposed to take until it was measured."""
KNOWN_ROWS = 128
"""Rows that verified all K drafts, from which on no trial of all drafts is needed."""
CONFIDENCE_EVERY = 16
"""Decisions between two looks at confidence while all drafts are verified."""
ANSWERS = 128
"""Answers after which the length of an answer weighs 1/e in their mean."""
PLAIN = ShapeFamily(0)


class AdaptivePolicy:
    """Choose the shapes of steps; deterministic in the results and times that it is shown.

    Args:
        k: most drafts a step.
        costs: of every family that may be chosen, on the device.
        admissions: of every number of drafts.
        answer_tokens: of an answer, as long as none has ended.
        settings: see there.
    """

    def __init__(
        self,
        k: int,
        costs: StepCosts,
        admissions: AdmissionCosts,
        answer_tokens: float,
        settings: AdaptiveVerification,
    ) -> None:
        self.k, self.costs, self.admissions, self.settings = k, costs, admissions, settings
        self.answer_tokens, self.late_steps, self._answers = answer_tokens, 0, 0
        self.host_ms, self.decision_ms, self.catch_up_ms = 0.0, 0.5, FIRST_CATCH_UP_MS
        self.rates = AcceptanceRates(k, settings.memory)
        self.survival, self.times = SurvivalModel(k, settings.window), WallTimes()
        self._everything = self._current = ShapeFamily(k)
        self._trial: ShapeFamily | None = None
        self._expected: dict[ShapeFamily, float] = {}
        self._overshoot: list[float] = []
        # By K and share: which part of all accepted drafts those of the share are.
        self._accepted_parts: dict[tuple[int, float], float] = {}
        self._most_steps, self._since_confidence = FIRST_STEPS, CONFIDENCE_EVERY
        self._credit_ms = self._elapsed_ms = 0.0
        self._has_new_confidence = self._all_draft = False

    @property
    def families(self) -> list[ShapeFamily]:
        """The families to choose from."""
        return list(self.costs.measured)

    @property
    def scale(self) -> Array:
        """Scale of the calibration of confidence."""
        return self.survival.scale

    @property
    def bias(self) -> Array:
        """Bias of the calibration of confidence."""
        return self.survival.bias

    def observe(self, accepted: Array, num_drafts: Array) -> None:
        """Take in rows int [N] of steps that verified all their drafts."""
        self.rates.add(accepted, num_drafts)

    def observe_confidence(self, accepted: Array, num_drafts: Array, confidence: Array) -> None:
        """Take in rows [N] of steps, with the confidence float [N, k] of their drafts."""
        self.survival.add(accepted, num_drafts, confidence)
        self._has_new_confidence, self._since_confidence = True, 0

    def observe_answer(self, tokens: int) -> None:
        """Take in the number of tokens of an answer that has ended."""
        self._answers = min(self._answers + 1, ANSWERS)
        self.answer_tokens += (tokens - self.answer_tokens) / self._answers

    def observe_window(self, window: Window) -> None:
        """Take in the wall time of steps of one family."""
        self.times.add(window)

    def ms(self, family: ShapeFamily, rows: int) -> float:
        """Return the modelled milliseconds from one step to the next."""
        return max(self.costs.ms(family, rows), self.host_ms)

    def token_ms(self, family: ShapeFamily, rows: int) -> float:
        """Return in how many milliseconds each row emits a token, if requests always wait.

        An answer's first token comes from the prefill. Between its steps lie the admissions of all
        rows. The modelled time is corrected by measured wall times.
        """
        expected = self._expected[replace(family, confidence=False)]
        overshoot = self._overshoot[family.k] * (expected - 1)
        steps = (self.answer_tokens - 1 + overshoot) / expected + self.late_steps
        steps = max(steps, 1.0)
        admitted = rows / steps  # after each step, and none after exp(−admitted) of them
        share = 1 - exp(-admitted)
        extra_ms = self.admissions.extra_ms(
            family.k, admitted / share, self.costs.ms(family, rows), self.host_ms
        )
        step_ms = self.ms(family, rows) + share * extra_ms
        return steps * step_ms * self.times.ratio(family, rows) / self.answer_tokens

    def decide(self, rows: int) -> Decision:
        """Decide the next steps of `rows` rows."""
        self._credit_ms += self.settings.trial_share * self._elapsed_ms
        self._expect()
        self.times.fit(rows, self.costs, self.admissions, self.host_ms)
        current, self._trial = self._best(rows), None
        if self._current.k and not current.k:
            self.rates.forget(SUSPENDED_ROWS)
        self._current = current
        if self._seen < FIRST_ROWS:
            missing = ceil((FIRST_ROWS - self._seen) / rows)
            # The results of the last step are not there yet when the next one begins.
            decision = Decision(self._everything, max(FIRST_STEPS, missing + 1))
        else:
            decision = (
                self._next_timing(rows, known=False)
                or self._next_trial(rows)
                or self._next_look(rows)
                or self._next_timing(rows, known=True)
                or self._next_steps(rows)
            )
        self._all_draft = decision.family.k > 0 and decision.most_rows is None
        self._elapsed_ms = decision.steps * self.ms(decision.family, rows)
        return decision

    def family(self, rows: int) -> ShapeFamily:
        """Return the family where the number of rows has changed between decisions."""
        if self._trial or not self._current.k or not self._expected:
            return self._trial or self._current
        self._current = self._best(rows)
        return self._current

    @property
    def _seen(self) -> float:
        return self.rates.drafted[0]

    def _best(self, rows: int) -> ShapeFamily:
        """Return the family with the most tokens a millisecond; all drafts until some were seen."""
        if self._seen < FIRST_ROWS:
            return self._everything
        promised = {
            family: 1 / self.token_ms(family, rows)
            for family in self._expected
            if family.share == 1 or rows >= self.settings.least_rows
        }
        plain, current = promised.pop(PLAIN, 0.0), self._current
        best = max(promised, key=lambda family: promised[family])
        doubt = self.rates.standard_error(best.k)
        if not current.k:
            least = (1 + max(doubt, self.settings.resume)) * plain
            return best if promised[best] > least else PLAIN
        if plain > (1 + doubt) * promised[best]:
            return PLAIN
        if promised[best] < (1 + self.settings.margin) * promised.get(current, 0.0):
            return current
        return best

    def _next_steps(self, rows: int) -> Decision:
        """Return steps of the present family, so many that decisions take little of the time."""
        family, settings = self._current, self.settings
        steps = ceil(self.decision_ms / (settings.decision_share * self.ms(family, rows)))
        self._most_steps = min(2 * self._most_steps, MOST_STEPS)
        steps = min(max(steps, FIRST_STEPS), self._most_steps)
        return Decision(family, steps)

    def _next_look(self, rows: int) -> Decision | None:
        """Return steps that state confidence, from which it is known what shares are worth."""
        current, settings = self._current, self.settings
        family = current if current.k > 1 else self._everything
        confident = ShapeFamily(family.k, confidence=True)
        self._since_confidence += 1
        if (
            not current.k
            or current.share < 1
            or rows < settings.least_rows
            or confident not in self.costs.measured
            or self._since_confidence < CONFIDENCE_EVERY
        ):
            return None
        steps = ceil(settings.window / rows) + 1  # the first one's confidence is of no use
        if not self._pay(steps * self._lost_ms(confident, rows)):
            return None
        self._trial = family
        return Decision(family, steps, with_confidence=True)

    def _lost_ms(self, family: ShapeFamily, rows: int) -> float:
        """Return the milliseconds that a step loses against those of the present family."""
        tokens = self._expected[replace(family, confidence=False)]
        lost = self.token_ms(family, rows) - self.token_ms(self._current, rows)
        return max(tokens * lost, 0.0)

    def _pay(self, ms: float) -> bool:
        """Return whether a loss of so many milliseconds can be paid for; if so, it is."""
        if self._credit_ms < ms:
            return False
        self._credit_ms -= ms
        return True

    def _next_trial(self, rows: int) -> Decision | None:
        """Return a trial if one would tell something and may be paid for."""
        if self._current.k:
            if self.rates.drafted[-1] >= KNOWN_ROWS or self._current.share < 1:
                return None
            family, drafting = self._everything, rows
        else:
            drafting = min(rows, TRIAL_ROWS)
            family = min(
                (f for f in self._expected if f.k and f.share == 1),
                key=lambda f: self.token_ms(f, rows),
            )
        steps = ceil(TRIAL_DRAFTS / drafting) + 1
        lost_ms = steps * self._lost_ms(family, rows)
        if not self._current.k:  # most rows' drafts are worth nothing
            lost_ms = self.catch_up_ms + steps * (self.ms(family, rows) - self.ms(PLAIN, rows))
        if not self._pay(lost_ms):
            return None
        self._trial = family
        return Decision(family, steps, most_rows=None if self._current.k else drafting)

    def _next_timing(self, rows: int, *, known: bool) -> Decision | None:
        """Return steps of a family whose wall time is unknown, or known from the oldest trial.

        The first trial of a family needs no credit, since the model may be wrong about its loss.
        """
        current = self._current
        if not (self.times.active and self._all_draft and (current.k or not known)):
            return None
        longest_ms = 2 * self.token_ms(current, rows)
        rivals = [
            f
            for f in self._expected
            if f.k and f.share == 1 and f != current and self.token_ms(f, rows) < longest_ms
        ]
        family = self.times.next_trial(rivals, rows, known=known)
        if family is None:
            return None
        lost_ms = TRIAL_STEPS * self._lost_ms(family, rows) + self.decision_ms
        if known and not self._pay(lost_ms):
            return None
        self.times.note_trial(family, rows)
        self._trial = family
        return Decision(family, TRIAL_STEPS)

    def _expect(self) -> None:
        """Compute the expected tokens of a row by family."""
        if self._has_new_confidence:
            self._has_new_confidence = False
            self.survival.fit()
            self._accepted_parts = {}
        levels = self.rates.expected_tokens()
        # For each accepted draft, since shares of the drafts have fewer of them.
        self._overshoot = [
            tokens / max(expected - 1, 1e-9)
            for tokens, expected in zip(self.rates.overshoot(), levels, strict=True)
        ]
        shares = [family for family in self.families if family.share < 1]
        chosen = self._current.share < 1
        if shares and self.survival.is_known and (chosen or not self._accepted_parts):
            survival = self.survival.survival()
            if chosen:  # counts of chosen drafts tell nothing of the others
                levels = [1.0, *(1 + survival.mean(0).cumsum()).tolist()]
            self._accepted_parts = accepted_parts(survival, shares)
        self._expected = {
            family: levels[family.k] for family in self.families if not family.confidence
        }
        for family in shares:
            part = self._accepted_parts.get((family.k, family.share))
            if part is None:
                del self._expected[family]
            else:
                self._expected[family] = 1 + part * (levels[family.k] - 1)
